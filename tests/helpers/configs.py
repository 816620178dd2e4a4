"""Small configurations for tests, made as a run makes its own: from flags, by the resolver."""

import dataclasses
from typing import Any

from megatron.config import ModelConfig, ModelFlags, RunConfig

SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "kv_channels": 4, "seq_length": 8,
}  # fmt: skip


def model_config(**flags: Any) -> ModelConfig:
    """The network that flags ask for, by field of ModelFlags; a small one but for those."""
    return ModelFlags(**SMALL | flags).resolve()


def run_config(model: ModelConfig | None = None, **parts: Any) -> RunConfig:
    """A run of a small network with the usual values, but for these parts."""
    return RunConfig(model=model or model_config(), **parts)


def with_flags(model: ModelConfig, **flags: Any) -> ModelConfig:
    """A network that is asked for with other flags."""
    return dataclasses.replace(model.flags(), **flags).resolve()
