"""Flags of multi-token prediction: what they resolve to, and what is refused by name."""

import pytest

from megatron.config import ConfigError
from megatron.config.run import RunConfig
from megatron.families import trained_spec
from megatron.features.multi_token.flags import MultiTokenConfig
from megatron.run.run import parse_run

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 2 "
    "--tokenizer-type NullTokenizer --vocab-size 99 --mock-data"
).split()


def config(*flags: str, family: str = "gpt") -> RunConfig:
    return parse_run(None, [*TINY, *flags], family=family).config


def test_losses_have_the_mean_weight():
    model = config("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3")
    losses = trained_spec(model).losses
    assert losses == {"lm loss": 1.0, "mtp_0_loss": 0.15, "mtp_1_loss": 0.15}


def test_none_is_as_without_the_flag():
    part = config("--mtp-num-layers", "0").model.part(MultiTokenConfig)
    assert part.idle and part == MultiTokenConfig()


@pytest.mark.parametrize(
    ("flags", "family", "words"),
    [
        ("--mtp-num-layers 16", "gpt", "--seq-length 16"),
        ("--mtp-num-layers -1", "gpt", "--mtp-num-layers"),
        ("--mtp-num-layers 1 --kd --load-teacher teacher", "gpt", "--kd has a loss of its own"),
        ("--mtp-num-layers 1 --mtp-hybrid-override-pattern M", "gpt", "of the last layer"),
    ],
)
def test_what_cannot_be_is_named(flags, family, words, capsys):
    with pytest.raises((ConfigError, SystemExit)) as error:
        config(*flags.split(), family=family)
    assert words in f"{error.value} {capsys.readouterr().err}"
