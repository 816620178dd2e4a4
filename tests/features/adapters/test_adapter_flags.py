"""Flags of adapters that a run begins with."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, RunConfig, resolve

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 9 --lr 1e-3"
)


def config(flags: str) -> RunConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split())
    return resolve(settings, 1).config


def test_an_adapter_is_loaded_with_adapters_only():
    with pytest.raises(ConfigError, match="--load-adapter folder has an effect with --lora only"):
        config("--load-adapter folder")
