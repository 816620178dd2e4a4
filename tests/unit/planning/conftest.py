"""Small models for the planner's tests."""

import dataclasses
from collections.abc import Callable

import pytest

from megatron.config import ModelConfig, RunConfig

SHAPE = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4,
    "num_query_groups": 4, "kv_channels": 16, "seq_length": 128, "max_position_embeddings": 128,
    "make_vocab_size_divisible_by": 8, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
KINDS = {
    "gpt2": {},
    "gpt2 untied": {"untie_embeddings_and_output_weights": True},
    "llama": LLAMA,
    "llama tied": LLAMA | {"untie_embeddings_and_output_weights": False},
    "one key head": {"num_query_groups": 1},
    "bias on qkv": LLAMA | {"add_qkv_bias": True, "num_query_groups": 1},
    "wide heads": {"kv_channels": 24, "max_position_embeddings": 200},
}


@pytest.fixture(scope="session")
def small() -> Callable[..., ModelConfig]:
    """Makes a complete small model of 61 tokens: its kind, the tensor size it is padded for, and
    values that are other than usual."""

    def make(kind: str = "gpt2", tensor: int = 1, **changes) -> ModelConfig:
        config = dataclasses.replace(
            RunConfig(), model=ModelConfig(**SHAPE | KINDS[kind] | changes)
        )
        parallel = dataclasses.replace(config.parallel, tensor_model_parallel_size=tensor)
        return dataclasses.replace(config, parallel=parallel).with_vocabulary(61).model

    return make
