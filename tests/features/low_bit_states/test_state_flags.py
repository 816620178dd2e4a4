"""Flags of the storage of the optimizer's states."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-3"
)


def config(flags: str, processes: int = 1) -> RunConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split())
    return resolve(settings, processes).config


STATES = "--use-precision-aware-optimizer"


def test_dtypes_of_states():
    assert config("--bf16").precision.states is None
    assert config("--bf16 --exp-avg-dtype fp32").precision.states is None
    assert config(f"--bf16 {STATES}").precision.states == ("fp32", "fp32", "fp32")
    flags = "--main-params-dtype bf16 --exp-avg-dtype int8 --exp-avg-sq-dtype bf16"
    assert config(f"--bf16 {STATES} {flags}").precision.states == ("bf16", "int8", "bf16")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"--bf16 {STATES} --optimizer sgd", "of Adam, not of --optimizer sgd: leave it out"),
        ("--bf16 --exp-avg-dtype bf16", "--exp-avg-dtype bf16 has an effect with --use-precision"),
        (
            f"--bf16 {STATES} --save a --checkpoint-format deepspeed",
            "contradicts --checkpoint-format deepspeed: .* --save-universal",
        ),
        (STATES, "use --bf16 with --zero-stage 1 or 2"),
    ],
)
def test_refused_dtypes_of_states(flags, words):
    with pytest.raises(ConfigError, match=words):
        config(flags)
