"""Curricula in the DeepSpeed JSON: read, compared with the flags, and kept from DeepSpeed."""

import json

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import complete, for_engine, merge
from megatron.features.curriculum.flags import CurriculumConfig, sequence_lengths

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 64 --lr 1 "
    "--micro-batch-size 1 --train-iters 10"
).split()
LENGTHS = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8},
}


def write(folder, content):
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return str(path)


def run(path, *flags):
    content = read_json(path)
    settings = merge(FlagParser(*FLAG_CLASSES).settings([*FLAGS, *flags]), content, path, 1)
    config = resolve(settings, 1).config.with_vocabulary(10)
    return config, complete(content, config)


def test_the_section_is_part_of_the_configuration(tmp_path):
    config, content = run(write(tmp_path, {"curriculum_learning": LENGTHS}))
    assert sequence_lengths(config.section(CurriculumConfig)).highest == 64
    assert content["curriculum_learning"] == LENGTHS
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.section(CurriculumConfig) == config.section(CurriculumConfig)


def test_flags_say_the_same(tmp_path):
    text = json.dumps(LENGTHS, sort_keys=True)
    config, content = run(write(tmp_path, {}), "--curriculum-learning", text)
    assert sequence_lengths(config.section(CurriculumConfig)).highest == 64
    assert content["curriculum_learning"] == LENGTHS
    other = json.dumps(LENGTHS | {"max_difficulty": 32}, sort_keys=True)
    with pytest.raises(
        ConfigError, match="--curriculum-learning .* contradicts curriculum_learning"
    ):
        run(write(tmp_path, {"curriculum_learning": LENGTHS}), "--curriculum-learning", other)


def test_deepspeed_never_sees_it(tmp_path):
    """Its configuration refuses the first key, and would act on the second."""
    sections = {
        "curriculum_learning": LENGTHS,
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": False}},
    }
    config, content = run(write(tmp_path, sections))
    given = for_engine(content, config, on_cpu=True)
    assert not sections.keys() & given.keys()
    assert not DeepSpeedConfig(given).data_efficiency_enabled
    with pytest.raises(Exception, match="curriculum_learning"):
        DeepSpeedConfig(given | {"curriculum_learning": LENGTHS})


def test_mistakes_name_file_and_key(tmp_path):
    path = write(tmp_path, {"curriculum_learning": LENGTHS | {"max_difficulty": 60}})
    message = r"ds.json: curriculum_learning.max_difficulty is 60; it must be a multiple of diff"
    with pytest.raises(ConfigError, match=message):
        read_json(path)
    for value in (3, None, [LENGTHS]):
        with pytest.raises(ConfigError, match="ds.json: data_efficiency is .*must be an object"):
            read_json(write(tmp_path, {"data_efficiency": value}))


def test_automatic_and_disabled_sections(tmp_path):
    config, content = run(
        write(tmp_path, {"curriculum_learning": "auto", "data_efficiency": {"enabled": False}})
    )
    assert sequence_lengths(config.section(CurriculumConfig)) is None
    assert "curriculum_learning" not in content
