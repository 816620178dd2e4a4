"""BLOOM: ALiBi, normalised embeddings, LayerNorm, biases everywhere, GELU by the tanh
approximation."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import (
    ALIBI,
    BIASES,
    LAYER_NORM,
    Requirement,
)
from megatron.formats.huggingface.parts import (
    block,
    head_width,
    linear,
    norm,
    untied,
    weight,
)
from megatron.formats.huggingface.reorder import GROUPED_QKV
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture


def _four_times_wide(model: ModelConfig) -> bool:
    return model.mlp.ffn_hidden_size == 4 * model.hidden_size


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        "seq_length": model.positions.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.attention.num_attention_heads,
        "attention_dropout": model.attention.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "layer_norm_epsilon": model.norm.norm_epsilon,
        "initializer_range": model.init_method_std,
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    given.only(
        "apply_residual_connection_post_layernorm", (False,), "here the residual is not normalised"
    )
    # How Megatron-DeepSpeed computed, which is in the first files; none of it changes the model.
    given.unused(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion",
        "offset_alibi", "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
    )  # fmt: skip
    hidden = given.whole(("hidden_size", "n_embed"), 64)
    heads = given.whole(("n_head", "num_attention_heads"), 8)
    given.only("n_inner", (None, 4 * hidden), "such an MLP is four times as wide")
    return {
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_layers": given.whole(("n_layer", "num_hidden_layers"), 2),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": head_width(given, hidden, heads),
        # Nothing limits the length; it is what the model was trained with, if the file says so.
        "max_position_embeddings": given.whole("seq_length", 2048),
        "norm_epsilon": given.number("layer_norm_epsilon", 1e-5),
        "hidden_dropout": given.number("hidden_dropout", 0.0),
        "attention_dropout": given.number("attention_dropout", 0.0),
        "init_method_std": given.number("initializer_range", 0.02),
    }


BLOOM = Architecture(
    title="BLOOM",
    model_type="bloom",
    causal_lm="BloomForCausalLM",
    entries=(
        *weight("embedding.word_embeddings", "transformer.word_embeddings"),
        *norm("embedding.norm", "transformer.word_embeddings_layernorm"),
        *block(
            "transformer.h.{n}",
            norm("attention_norm", "input_layernorm"),
            linear("attention.qkv", "self_attention.query_key_value", form=GROUPED_QKV),
            linear("attention.proj", "self_attention.dense"),
            norm("mlp_norm", "post_attention_layernorm"),
            linear("mlp.up", "mlp.dense_h_to_4h"),
            linear("mlp.down", "mlp.dense_4h_to_h"),
        ),
        *norm("final_norm.norm", "transformer.ln_f"),
        *weight("output_layer", "lm_head", when=untied),
    ),
    requirements=(
        ALIBI,
        LAYER_NORM,
        BIASES,
        Requirement(lambda m: m.norm.embed_layernorm, "--embed-layernorm"),
        Requirement(lambda m: m.mlp.activation == "gelu_tanh", "GELU by the tanh approximation"),
        Requirement(_four_times_wide, "--ffn-hidden-size four times --hidden-size"),
    ),
    features=frozenset({"embed_norm"}),
    write=_write,
    read=_read,
    vocab_size=250880,
    tied=True,
    base_prefix="transformer.",
)
"""The table of BLOOM."""
