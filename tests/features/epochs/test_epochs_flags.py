"""Epochs of scripts of 2019, and next to other lengths of a run."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3"
)


def config(flags: str, processes: int = 2) -> RunConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split())
    return resolve(settings, processes).config


SAVE = "--save checkpoints"


@pytest.mark.parametrize(
    "old, new",
    [
        (f"{SAVE} --epochs 3 --save-iters 10", f"{SAVE} --train-iters 300 --save-interval 10"),
        ("--epochs 3 --model-parallel-size 1", "--train-iters 300"),
    ],
)
def test_scripts_of_2019_multiply(old, new):
    assert config(f"--train-iters 100 {old}") == config(new)


@pytest.mark.parametrize(
    "length",
    [
        "--train-iters 8",
        "--train-samples 8",
        "--train-tokens 800",
        "--train-samples 8 --save-iters 10 --save a",
    ],
)
def test_epochs_contradict_another_length(length):
    with pytest.raises(ConfigError, match=f"--epochs 2 and {length[:16]}.* both say how long"):
        config(f"{length} --epochs 2")
