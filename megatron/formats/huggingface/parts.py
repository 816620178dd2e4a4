"""Lines that several tables share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.reorder import (
    GATE_AND_UP,
    SAME,
    SEPARATE_QKV,
    Reordering,
)
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Entry, always

Condition = Callable[[ModelConfig], bool]

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"bias_gelu_fusion": False},
    "gelu_python": {"bias_gelu_fusion": False},
    "gelu_new": {},
    "gelu_fast": {},
    "gelu_accurate": {},
    "gelu_pytorch_tanh": {},
    "relu": {"relu": True},
    "relu2": {"squared_relu": True},
}
"""Our fields by the name of an activation without a gate."""

ACTIVATION_NAMES = {
    "gelu_tanh": "gelu_new",
    "gelu_erf": "gelu",
    "relu": "relu",
    "squared_relu": "relu2",
}
"""Their name by ours."""

GATES: dict[str, dict[str, Any]] = {
    "silu": {"glu_activation": "swiglu"},
    "swish": {"glu_activation": "swiglu"},
    "gelu_pytorch_tanh": {"glu_activation": "geglu"},
    "gelu_new": {"glu_activation": "geglu"},
    "gelu_fast": {"glu_activation": "geglu"},
}
"""Our fields by the name of a gate's activation."""

GATE_NAMES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
"""Their name by ours."""


def biased(model: ModelConfig) -> bool:
    """Whether all linear layers have biases."""
    return model.mlp.bias


def qkv_biased(model: ModelConfig) -> bool:
    """Whether queries, keys and values have biases."""
    return model.attention.qkv_bias


def attention_biased(model: ModelConfig) -> bool:
    """Whether all of attention's linear layers have biases."""
    return model.attention.proj_bias


def untied(model: ModelConfig) -> bool:
    """Whether the head has weights of its own."""
    return not model.embedding.tied


def _norm_biased(model: ModelConfig) -> bool:
    return model.norm.normalization == "LayerNorm"


def weight(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """A table of embeddings, or the head."""
    return (Entry(f"{ours}.weight", (f"{theirs}.weight",), when=when),)


def norm(ours: str, theirs: str, when: Condition = always) -> tuple[Entry, ...]:
    """A norm; LayerNorm has a bias."""
    return (
        Entry(f"{ours}.weight", (f"{theirs}.weight",), when=when),
        Entry(f"{ours}.bias", (f"{theirs}.bias",), when=lambda m: when(m) and _norm_biased(m)),
    )


def linear(
    ours: str, *theirs: str, form: Reordering = SAME, bias: Condition = biased
) -> tuple[Entry, ...]:
    """A linear layer. What is transposed in its weight leaves its bias alone."""
    bias_form = SAME if form.name == "transposed" else form
    return (
        Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), form),
        Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), bias_form, bias),
    )


def block(prefix: str, *parts: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries of a block, whose names lack ``layers.{n}.`` and ``prefix``."""
    return tuple(
        dataclasses.replace(
            entry,
            ours=f"layers.{{n}}.{entry.ours}",
            theirs=tuple(f"{prefix}.{name}" for name in entry.theirs),
        )
        for part in parts
        for entry in part
    )


def llama_block(*further: Sequence[Entry], mlp_norm: str = "post_attention_layernorm",
                qkv_bias: Condition = biased,
                proj_bias: Condition = biased) -> tuple[Entry, ...]:  # fmt: skip
    """The block of Llama and those that name their tensors like it.

    Args:
        further: entries that Llama does not have.
        mlp_norm: what the norm in front of the MLP is called.
        qkv_bias: whether queries, keys and values have biases.
        proj_bias: whether attention's output projection has a bias.
    """
    return block(
        "model.layers.{n}",
        norm("attention_norm", "input_layernorm"),
        linear("attention.qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
               form=SEPARATE_QKV, bias=qkv_bias),
        linear("attention.proj", "self_attn.o_proj", bias=proj_bias),
        *further,
        norm("mlp_norm", mlp_norm),
        linear("mlp.up", "mlp.gate_proj", "mlp.up_proj", form=GATE_AND_UP),
        linear("mlp.down", "mlp.down_proj"),
    )  # fmt: skip


EMBEDDING = weight("embedding.word_embeddings", "model.embed_tokens")
"""The token table of Llama and its like."""
FINAL = (
    *norm("final_norm.norm", "model.norm"),
    *weight("output_layer", "lm_head", when=untied),
)
"""Final norm and head of Llama and its like."""


def read_shape(
    given: HFConfigReader,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    groups: int | None,
    positions: int,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Sizes, as Llama and its like name them.

    Args:
        given: the keys.
        hidden: default of hidden_size.
        inner: default of intermediate_size.
        layers: default of num_hidden_layers.
        heads: default of num_attention_heads.
        groups: default of num_key_value_heads; None for the number of heads.
        positions: default of max_position_embeddings.
        head_dim: default of head_dim; None for hidden_size / num_attention_heads.
    """
    width = given.whole("hidden_size", hidden)
    queries = given.whole("num_attention_heads", heads)
    keys = given.optional_whole("num_key_value_heads", groups) or queries
    channels = given.optional_whole("head_dim", head_dim)
    if channels is None:
        channels = head_width(given, width, queries)
    if queries % keys:
        given.refuse("num_key_value_heads", keys, f"it must divide num_attention_heads {queries}")
    return {
        "hidden_size": width,
        "ffn_hidden_size": given.whole("intermediate_size", inner),
        "num_layers": given.whole("num_hidden_layers", layers),
        "num_attention_heads": queries,
        "num_query_groups": keys,
        "kv_channels": channels,
        "max_position_embeddings": given.whole("max_position_embeddings", positions),
    }


def head_width(given: HFConfigReader, hidden: int, heads: int) -> int:
    """Width of a head where the file does not say.

    Raises:
        CheckpointError: the heads do not divide the hidden size.
    """
    if hidden % heads:
        given.refuse("num_attention_heads", heads, f"it must divide the hidden size {hidden}")
    return hidden // heads


def read_rms(given: HFConfigReader, epsilon: float, act: str = "hidden_act",
             default: str = "silu") -> dict[str, Any]:  # fmt: skip
    """Norm, activation, dropout and initialisation of Llama and its like, without biases."""
    return {
        "normalization": "RMSNorm",
        "norm_epsilon": given.number("rms_norm_eps", epsilon),
        "add_bias_linear": False,
        "attention_dropout": given.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": given.number("initializer_range", 0.02),
        **given.choice(act, default, GATES),
    }


def write_shape(model: ModelConfig) -> dict[str, Any]:
    """Sizes and norm, as Llama and its like name them."""
    return {
        "max_position_embeddings": model.positions.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_attention_heads,
        "num_key_value_heads": model.attention.num_query_groups,
        "attention_dropout": model.attention.attention_dropout,
        "rms_norm_eps": model.norm.norm_epsilon,
        "initializer_range": model.init_method_std,
    }
