"""Sections of DeepSpeed's JSON about curricula: what is read and what is refused."""

import copy
import json

import pytest

from megatron.config import ConfigError
from megatron.features.curriculum.flags import (
    CurriculumConfig,
    data_sampling,
    sequence_lengths,
    without_sampling,
)
from megatron.run.run import parse_run

LENGTHS = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8, "root_degree": 2},
}
SCHEDULE = {key: LENGTHS[key] for key in list(LENGTHS)[2:]}
TRUNCATE = SCHEDULE | {"difficulty_type": "value", "clustering_type": "single_cluster"}
RARITY = SCHEDULE | {
    "difficulty_type": "value",
    "clustering_type": "schedule_based",
    "index_to_sample_path": "s",
    "index_to_metric_path": "m",
}
EFFICIENCY = {
    "enabled": True,
    "seed": 3,
    "data_routing": {"enabled": False, "random_ltd": {"enabled": False}},
    "data_sampling": {
        "enabled": True,
        "num_epochs": 2,
        "num_workers": 0,
        "curriculum_learning": {
            "enabled": True,
            "data_cluster_path": "c",
            "curriculum_metrics": {"vocab_rarity": RARITY, "seqlen_truncate": TRUNCATE},
        },
    },
}


def changed(section, path, value):
    """A copy with one value replaced; None removes the key."""
    result = copy.deepcopy(section)
    *outer, last = path.split("/")
    node = result
    for key in outer:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return result


def test_what_a_full_section_says():
    config = CurriculumConfig(data_efficiency=json.dumps(EFFICIENCY))
    sampling = data_sampling(config)
    assert (sampling.seed, sampling.num_epochs) == (3, 2)
    (metric,) = sampling.metrics
    assert (metric.name, metric.percentile) == ("vocab_rarity", False)
    assert (metric.index_to_sample_path, metric.index_to_metric_path) == ("s", "m")
    assert sampling.lengths == sequence_lengths(config)
    assert (sampling.lengths.highest, sampling.lengths.root) == (64, 2.0)
    alone = sequence_lengths(CurriculumConfig(json.dumps(LENGTHS)))
    assert (alone.lowest, alone.increment, alone.steps) == (8, 8, 100)


@pytest.mark.parametrize(
    "path", ["enabled", "data_sampling/enabled", "data_sampling/curriculum_learning/enabled"]
)
def test_what_is_not_enabled_does_nothing(path):
    config = CurriculumConfig(data_efficiency=json.dumps(changed(EFFICIENCY, path, False)))
    assert data_sampling(config) is None and sequence_lengths(config) is None
    assert sequence_lengths(CurriculumConfig('{"enabled": false, "whatever": 1}')) is None
    assert sequence_lengths(CurriculumConfig()) is None


def test_the_length_remains_without_sampling():
    """A measurement reads the samples of the run in their usual order."""
    plain = without_sampling(CurriculumConfig(data_efficiency=json.dumps(EFFICIENCY)))
    assert data_sampling(plain) is None
    assert sequence_lengths(plain).highest == 64
    only = changed(
        EFFICIENCY, "data_sampling/curriculum_learning/curriculum_metrics", {"v": RARITY}
    )
    config = CurriculumConfig(json.dumps(LENGTHS), json.dumps(only))
    assert without_sampling(config) == CurriculumConfig(json.dumps(LENGTHS))


DISCRETE = LENGTHS | {
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [8, 16, 64], "max_step": [5, 9]},
}


@pytest.mark.parametrize(
    ("section", "path", "value", "message"),
    [
        (LENGTHS, "curriculum_type", "rarity", "curriculum_type is \"rarity\"; it must be seqlen"),
        (LENGTHS, "schedule_type", "custom", "schedule_type custom is a function"),
        (LENGTHS, "schedule_type", "fixed", "must be fixed_linear or fixed_root or fixed_discrete"),
        (LENGTHS, "schedule_config/root_degree", None, "root_degree is missing"),
        (LENGTHS, "schedule_config/root_degree", -1, "root_degree is -1; it must be a positive"),
        (LENGTHS, "schedule_config/difficulty_step", 12, "max_difficulty is 64; .* multiple of d"),
        (LENGTHS, "schedule_config/difficulty_step", 4, "difficulty_step 4 must be a multiple"),
        (LENGTHS, "schedule_config/steps", 4, "schedule_config has no key steps"),
        (LENGTHS, "schedule_config/total_curriculum_step", 0, "an integer of at least 1"),
        (LENGTHS, "min_difficulty", 72, "min_difficulty is 72; it must be at most max_diff"),
        (LENGTHS, "min_difficulty", 0, "min_difficulty is 0; it must be an integer"),
        (LENGTHS, "max_difficulty", "64", "max_difficulty is \"64\"; it must be an integer"),
        (LENGTHS, "max_dificulty", 64, "no key max_dificulty; the nearest known key is"),
        (LENGTHS, "enabled", "yes", 'enabled is "yes"; it must be true or false'),
        (LENGTHS, "schedule_config", [], r"schedule_config is \[\]; it must be an object"),
        (DISCRETE, "schedule_config/max_step", [5], "the last step of each of the 3 difficulties"),
        (DISCRETE, "schedule_config/difficulty", [8, 8, 64], "a list of increasing positive integ"),
        (DISCRETE, "schedule_config/difficulty", [8, 20, 64], "difficulty 20 must be a multiple"),
        (DISCRETE, "schedule_config/difficulty", [8, 16, 72], "within min_difficulty 8, max_diff"),
    ],
)  # fmt: skip
def test_wrong_schedules(section, path, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        CurriculumConfig(curriculum_learning=json.dumps(changed(section, path, value)))
    assert str(caught.value).startswith("curriculum_learning")


METRICS = "data_sampling/curriculum_learning/curriculum_metrics"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("data_sampling/nmu_workers", 1, "the nearest known key is num_workers"),
        (METRICS, {}, "curriculum_metrics: name at least one metric"),
        (f"{METRICS}/seqlen_reshape", RARITY, "seqlen_truncate and seqlen_reshape both set the se"),
        (f"{METRICS}/vocab_rarity/difficulty_type", "rank", "must be value or percentile"),
        (f"{METRICS}/vocab_rarity/clustering_type", None, "clustering_type is missing"),
        (f"{METRICS}/vocab_rarity/index_to_sample_path", None, "the path of a file of tools/analy"),
        (f"{METRICS}/vocab_rarity/index_to_metric_path", 3, "index_to_metric_path is 3"),
        (f"{METRICS}/seqlen_truncate/clustering_type", "schedule_based", "must be single_cluster"),
        (f"{METRICS}/seqlen_truncate/schedule_config/difficulty_step", 1, "multiple of 8"),
        ("seed", -1, "seed is -1"),
    ],
)
def test_wrong_sampling(path, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        CurriculumConfig(data_efficiency=json.dumps(changed(EFFICIENCY, path, value)))
    assert str(caught.value).startswith("data_efficiency")


def test_a_difficulty_need_not_end_on_a_multiple():
    """As in a recipe of Megatron-DeepSpeed: 5 to 100 in steps of 8; of lengths that is an error."""
    path = f"{METRICS}/vocab_rarity"
    section = changed(EFFICIENCY, f"{path}/min_difficulty", 5)
    section = changed(section, f"{path}/max_difficulty", 100)
    config = CurriculumConfig(data_efficiency=json.dumps(section))
    (metric,) = data_sampling(config).metrics
    assert (metric.schedule.highest, metric.schedule.increment) == (100, 8)


def test_two_lengths_contradict():
    with pytest.raises(ConfigError, match="both set the sequence length; give one of them"):
        CurriculumConfig(json.dumps(LENGTHS), json.dumps(EFFICIENCY))
    CurriculumConfig(json.dumps(LENGTHS | {"enabled": False}), json.dumps(EFFICIENCY))


def test_text_that_is_no_section():
    for text in ("{", "[]", '"auto"'):
        with pytest.raises(ConfigError, match="curriculum_learning"):
            CurriculumConfig(curriculum_learning=text)


@pytest.mark.parametrize("family", ["t5", "biencoder"])
def test_samples_that_cannot_be_cut_are_refused_at_the_start(family):
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --mock-data "
        "--micro-batch-size 2 --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer "
        f"--vocab-size 99 --model-family {family}"
    ).split()
    if family == "t5":
        flags += "--decoder-num-layers 2 --decoder-seq-length 16".split()
    parse_run(None, flags)
    with pytest.raises(ConfigError, match=f"curriculum_learning .* of the family {family}, "):
        parse_run(None, [*flags, "--curriculum-learning", json.dumps(LENGTHS)])
