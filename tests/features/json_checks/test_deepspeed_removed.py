"""Keys that versions of DeepSpeed have removed: left out where they are off, refused where they are
on. ``tests/golden/deepspeed_json`` has the keys of each version, recorded from DeepSpeed itself."""

import importlib.metadata
import json
from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import REMOVED, complete, for_engine, merge
from megatron.features.json_checks import checks
from megatron.features.json_checks.checks import file_notes

OWN = {"curriculum_learning", "compression_training", "sequence_parallel_size"}
"""Keys that the trainer reads itself in some versions, and leaves out for DeepSpeed."""


GOLDEN = Path(__file__).parents[2] / "golden" / "deepspeed_json" / "keys.json"
VERSIONS = {
    version: {name: set(keys.split()) for name, keys in lists.items()}
    for version, lists in json.loads(GOLDEN.read_text()).items()
}
FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1 "
    "--micro-batch-size 1 --train-iters 10 --deepspeed_config ds.json"
).split()

OFF = [
    ("amp", {"enabled": False, "opt_level": "O1"}),
    ("amp", None),
    ("eigenvalue", {"enabled": False, "verbose": True}),
    ("elasticity", {"enabled": False, "max_train_batch_size": 2000}),
    ("graph_harvesting", False),
    ("nebula", {"enabled": False}),
    ("progressive_layer_drop", {"enabled": False, "theta": 0.5}),
    ("quantize_training", {"enabled": False}),
    ("sparse_attention", {}),
    ("sparse_gradients", False),
    ("zero_optimization.mics_shard_size", -1),
    ("zero_optimization.mics_hierarchical_params_gather", False),
    ("zero_optimization.zeropp_loco_param", None),
]
ON = [
    ("amp", {"enabled": True}, "amp.enabled is on"),
    ("eigenvalue", {"enabled": True}, "eigenvalue.enabled is on"),
    ("elasticity", {"enabled": True}, "elasticity.enabled is on"),
    ("graph_harvesting", True, "graph_harvesting is on"),
    ("nebula", {"enabled": True}, "nebula.enabled is on"),
    ("progressive_layer_drop", {"enabled": True, "theta": 0.5}, "drop.enabled is on"),
    ("quantize_training", {"enabled": True}, "quantize_training.enabled is on"),
    ("sparse_attention", {"mode": "fixed", "block": 16}, "sparse_attention is on"),
    ("sparse_gradients", True, "sparse_gradients is on"),
    ("zero_optimization.mics_shard_size", 4, "zero_optimization.mics_shard_size 4 is on"),
    ("zero_optimization.mics_hierarchical_params_gather", True, "_params_gather is on"),
    ("zero_optimization.zeropp_loco_param", {"err_beta": 0.8}, "zeropp_loco_param is on"),
]
WRONG = [
    ("amp", {"enabled": "yes"}, 'amp.enabled is "yes"; it must be true or false'),
    ("sparse_gradients", 1, "sparse_gradients is 1; it must be true or false"),
    ("zero_optimization.mics_shard_size", "x", 'mics_shard_size is "x"; it must be an integer'),
]


def content_of(key, value):
    section, _, name = key.rpartition(".")
    return {section: {"stage": 1, name: value}} if section else {name: value}


def reading(folder, content):
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return read_json(str(path))


def completed(content):
    settings = merge(FlagParser(*FLAG_CLASSES).settings(FLAGS), content, "ds.json", 1)
    config = resolve(settings, 1).config
    return for_engine(complete(content, config), config, on_cpu=True)


def test_the_table_is_that_of_deepspeed():
    """The version of each key is the first that refuses it."""
    zero = "zero_optimization."
    first = {}
    for version, lists in VERSIONS.items():
        keys = lists["refused"] | {zero + key for key in lists["refused_zero"]}
        first = {key: version for key in keys} | first
    assert first.pop("curriculum_learning") == "0.19.8"
    assert first.pop("compression_training") == "0.19.7"
    assert first == REMOVED
    assert list(VERSIONS) == [f"0.19.{number}" for number in range(9)]


def test_the_page_has_each_key_with_its_version():
    page = (GOLDEN.parents[3] / "docs" / "reference" / "deepspeed-changes.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    told = {
        key.strip("`"): row[1] for row in rows if len(row) == 3 for key in row[0][2:].split(", ")
    }
    read = {"curriculum_learning": "0.19.8", "compression_training": "0.19.7"}
    for key, version in (REMOVED | read).items():
        assert told[key] == version


@pytest.mark.parametrize("version", VERSIONS)
def test_each_key_of_a_version_is_known_or_refused_with_a_reason(tmp_path, version):
    for key in VERSIONS[version]["read"] | VERSIONS[version]["refused"]:
        try:
            reading(tmp_path, {key: "auto"})
        except ConfigError as error:
            assert "has no key" not in str(error) or key in checks._NEWER_KEYS
    # No key is called known that this version would ignore.
    assert checks._KNOWN_KEYS - VERSIONS[version]["read"] <= OWN


@pytest.mark.parametrize("version", VERSIONS)
def test_a_key_that_came_later_is_refused_by_the_version(tmp_path, version, monkeypatch):
    monkeypatch.setattr(checks, "version", lambda name: f"{version}+abc")
    for key, value in {"log_level": "info", "disable_python_gc": True}.items():
        if key in VERSIONS[version]["read"]:
            assert reading(tmp_path, {key: value}) == {key: value}
            continue
        with pytest.raises(ConfigError, match=f'DeepSpeed {version}.* has no key "{key}".*0.19'):
            reading(tmp_path, {key: value})


@pytest.mark.parametrize("key, value", OFF)
def test_a_key_that_is_off_is_left_out_with_a_line(tmp_path, key, value):
    raw = content_of(key, value)
    content = reading(tmp_path, raw)
    assert content == raw
    (note,) = file_notes(content, "folder/ds.json")
    assert note.startswith(f"folder/ds.json: {key} is off, and is left out: ")
    assert note.endswith(REMOVED[key])
    given = completed(content)
    assert key.rpartition(".")[2] not in json.dumps(given)
    DeepSpeedConfig(dict(given))
    assert content == raw, "the JSON that was read stays as it is"


def test_deepspeed_itself_refuses_each_key():
    """As long as it does, the lines above are true."""
    version = importlib.metadata.version("deepspeed").split("+")[0]
    refused = VERSIONS[version]["refused"] | VERSIONS[version]["refused_zero"]
    given = completed({})
    for key, value in OFF:
        section, _, name = key.rpartition(".")
        if name not in refused:
            continue
        content = given | ({section: {**given[section], name: value}} if section else {key: value})
        with pytest.raises(Exception, match="removed"):
            DeepSpeedConfig(content)


@pytest.mark.parametrize("key, value, told", ON)
def test_a_key_that_is_on_is_refused(tmp_path, key, value, told):
    with pytest.raises(ConfigError) as raised:
        reading(tmp_path, content_of(key, value))
    text = str(raised.value)
    assert "ds.json: " in text and told in text
    assert f"DeepSpeed removed {key} in {REMOVED[key]}: " in text and "; remove the key" in text


@pytest.mark.parametrize("key, value, told", WRONG)
def test_a_switch_that_is_neither_is_refused(tmp_path, key, value, told):
    with pytest.raises(ConfigError) as raised:
        reading(tmp_path, content_of(key, value))
    assert told in str(raised.value)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_trainers_curriculum_is_kept_and_said(tmp_path, enabled):
    lengths = {
        "enabled": enabled, "min_difficulty": 8, "max_difficulty": 8,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 1, "difficulty_step": 8},
    }  # fmt: skip
    content = reading(tmp_path, {"curriculum_learning": lengths})
    (note,) = file_notes(content, "ds.json")
    assert note.startswith("ds.json: curriculum_learning is read by the trainer, and is left out")
    assert "curriculum_learning" not in completed(content)


def test_threads_of_offloading_have_another_key_now(tmp_path):
    content = reading(tmp_path, {"aio": {"thread_count": 2, "queue_depth": 16}})
    assert "the key is now aio.intra_op_parallelism" in file_notes(content, "ds.json")[0]
    DeepSpeedConfig(completed(content))
