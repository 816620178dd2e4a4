"""Sizes of batches as scripts of 2019 and of OneFlow give them."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-3"
)


def config(flags: str, processes: int = 2) -> RunConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split())
    return resolve(settings, processes).config


@pytest.mark.parametrize(
    "old, new",
    [
        ("--eval-batch-size 2 --eval-seq-length 32", ""),
        ("--num-accumulation-steps 3", "--global-batch-size 12"),
        ("--num-accumulation-steps 3 --global-batch-size 12", "--global-batch-size 12"),
    ],
)
def test_same_configuration(old, new):
    assert config(old) == config(new)


@pytest.mark.parametrize(
    "words, told",
    [
        (
            "--num-accumulation-steps 3 --global-batch-size 8",
            ["--global-batch-size 8 contradicts --num-accumulation-steps 3", "12 = "],
        ),
        (
            "--num-accumulation-steps 3 --rampup-batch-size 4 4 100",
            ["--num-accumulation-steps 3", "--rampup-batch-size", "--global-batch-size"],
        ),
        ("--num-accumulation-steps 0", ["--num-accumulation-steps 0 must be positive"]),
        ("--eval-batch-size 4", ["--eval-batch-size 4", "--micro-batch-size 2", "--skip-train"]),
        ("--eval-seq-length 64", ["--eval-seq-length 64", "--seq-length 32", "--skip-train"]),
    ],
)
def test_contradictions_are_refused(words, told):
    with pytest.raises(ConfigError) as error:
        config(words)
    for part in told:
        assert part in str(error.value)
