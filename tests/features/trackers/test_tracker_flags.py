"""Flags of trackers: what they give, and what is refused with which words."""

import operator

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)


def config(extra: str, world_size: int = 1) -> RunConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {extra}".split())
    return resolve(settings, world_size).config


UNUSED = (
    ("--wandb-entity us", "--report-to wandb", "--wandb-project p"),
    ("--tensorboard-queue-size 5", "--report-to tensorboard", "--tensorboard-dir d"),
)


@pytest.mark.parametrize("words, needed, instead", UNUSED)
def test_a_flag_without_effect_is_mentioned(words, needed, instead):
    for more in ("", instead):
        settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {words} {more}".split())
        note = f"{words} changes nothing without {needed}"
        assert (note in resolve(settings, 1).notes) == (not more)


MEGATRON = """
--tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size --log-timers-to-tensorboard
--log-batch-size-to-tensorboard --no-log-learnig-rate-to-tensorboard
--no-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard
--log-memory-to-tensorboard --log-world-size-to-tensorboard --log-optimizer-states-to-tensorboard
--log-params-norm --log-num-zeros-in-grad --timing-log-level --wandb-project --wandb-exp-name
--wandb-save-dir
""".split()


def test_megatrons_names_are_accepted():
    assert set(MEGATRON) <= set(FlagParser(*FLAG_CLASSES)._option_string_actions)


DERIVED = [
    ("--save runs/x", 1, "logging.trackers", ()),
    ("--save runs/x --report-to tensorboard", 1, "logging.tensorboard_dir", "runs/x/tensorboard"),
    ("--save /x --report-to mlflow", 1, "logging.mlflow_tracking_uri", "sqlite:////x/mlflow.db"),
    ("--save x --report-to trackio,wandb", 1, "logging.trackers", ("wandb", "trackio")),
    ("--save x --report-to trackio wandb", 1, "logging.trackers", ("wandb", "trackio")),
    (
        "--tensorboard-dir x --wandb-project y --report-to wandb",
        1, "logging.trackers", ("tensorboard", "wandb"),
    ),
    ("--tensorboard-dir x --wandb-project y --report-to none", 1, "logging.trackers", ()),
]  # fmt: skip


@pytest.mark.parametrize("flags, world_size, where, expected", DERIVED)
def test_derives(flags, world_size, where, expected):
    assert operator.attrgetter(where)(config(flags, world_size)) == expected


REFUSED = [
    ("--report-to wanbd,mlflow", 1, ["--report-to wanbd,mlflow", "mean wandb?", "trackio, none"]),
    ("--report-to none,wandb", 1, ["--report-to none,wandb", "contradicts"]),
    ("--report-to tensorboard", 1, ["--report-to tensorboard", "--tensorboard-dir", "--save"]),
    ("--report-to mlflow", 1, ["--report-to mlflow", "--mlflow-tracking-uri", "--save"]),
    ("--mlflow-tracking-uri https://me:1@a", 1, ["MLFLOW_TRACKING_PASSWORD in the environment"]),
]


@pytest.mark.parametrize("flags, world_size, words", REFUSED)
def test_refused(flags, world_size, words):
    with pytest.raises(ConfigError) as error:
        config(flags, world_size)
    assert [word for word in words if word not in str(error.value)] == []
