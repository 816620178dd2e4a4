"""Flags of saves in the background that lack another, or contradict it."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve

MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)


def resolved(flags):
    return resolve(FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split()), 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--async-save", "--async-save needs --save"),
        (
            "--save x --async-save --checkpoint-format deepspeed",
            "--async-save contradicts --checkpoint-format deepspeed",
        ),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        resolved(flags)


def test_accepted():
    assert resolved("--save x --async-save").config.checkpoint.async_save
