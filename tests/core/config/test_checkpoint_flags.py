"""Flags of checkpoints that contradict each other or lack another."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve

MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)


def resolved(flags):
    return resolve(FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split()), 1)


@pytest.mark.features
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--keep-last 2", "--keep-last 2 needs --save"),
        ("--save-universal", "--save-universal needs --save"),
        ("--save x --keep-last 0", "--keep-last 0 must be positive"),
        ("--save x --keep-last 1 --keep-every -5", "--keep-every -5 must be positive"),
        ("--save x --save-interval 0", "--save-interval 0 must be positive"),
        ("--save x --keep-every 5", "--keep-every 5 exempts .* needs it"),
        (
            "--save x --no-save-optim --checkpoint-format deepspeed",
            "--no-save-optim contradicts --checkpoint-format deepspeed",
        ),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        resolved(flags)


@pytest.mark.features
def test_accepted():
    flags = "--save x --save-interval 10 --keep-last 3 --keep-every 100"
    options = resolved(f"{flags} --save-universal").config.checkpoint
    assert options.keep_last == 3 and options.keep_every == 100
    assert resolved("--save x --checkpoint-format deepspeed --keep-last 1")
