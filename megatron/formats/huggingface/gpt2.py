"""GPT-2: learned positions, LayerNorm, biases everywhere, one plain activation.

Its linear layers are Conv1D, which hold the weight as [inputs, outputs]; the fused [q | k | v] is
in our order.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import BIASES, LAYER_NORM, LEARNED, NOT_GATED
from megatron.formats.huggingface.parts import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    block,
    head_width,
    linear,
    norm,
    untied,
    weight,
)
from megatron.formats.huggingface.reorder import TRANSPOSED
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture


def _write(model: ModelConfig) -> dict[str, Any]:
    hidden = model.hidden_size
    return {
        "n_positions": model.positions.max_position_embeddings,
        "n_embd": hidden,
        "n_layer": model.num_layers,
        "n_head": model.attention.num_attention_heads,
        "n_inner": None if model.mlp.ffn_hidden_size == 4 * hidden else model.mlp.ffn_hidden_size,
        "activation_function": ACTIVATION_NAMES[model.mlp.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention.attention_dropout,
        "layer_norm_epsilon": model.norm.norm_epsilon,
        "initializer_range": model.init_method_std,
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    given.only("scale_attn_weights", (True,), "attention scores are always scaled here")
    given.only("scale_attn_by_inverse_layer_idx", (False,), "all blocks scale scores alike here")
    given.only("add_cross_attention", (False,), "there is no cross-attention here")
    given.unused("reorder_and_upcast_attn", "n_ctx", "embd_pdrop", "predict_special_tokens")
    hidden = given.whole(("n_embd", "hidden_size"), 768)
    heads = given.whole(("n_head", "num_attention_heads"), 12)
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": given.optional_whole("n_inner") or 4 * hidden,
        "num_layers": given.whole(("n_layer", "num_hidden_layers"), 12),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": head_width(given, hidden, heads),
        "max_position_embeddings": given.whole(("n_positions", "max_position_embeddings"), 1024),
        "norm_epsilon": given.number("layer_norm_epsilon", 1e-5),
        "hidden_dropout": given.number("resid_pdrop", 0.1),
        "attention_dropout": given.number("attn_pdrop", 0.1),
        "init_method_std": given.number("initializer_range", 0.02),
        **given.choice("activation_function", "gelu_new", ACTIVATIONS),
    }


GPT2 = Architecture(
    title="GPT-2",
    model_type="gpt2",
    causal_lm="GPT2LMHeadModel",
    entries=(
        *weight("embedding.word_embeddings", "transformer.wte"),
        *weight("embedding.position_embeddings", "transformer.wpe"),
        *block(
            "transformer.h.{n}",
            norm("attention_norm", "ln_1"),
            linear("attention.qkv", "attn.c_attn", form=TRANSPOSED),
            linear("attention.proj", "attn.c_proj", form=TRANSPOSED),
            norm("mlp_norm", "ln_2"),
            linear("mlp.up", "mlp.c_fc", form=TRANSPOSED),
            linear("mlp.down", "mlp.c_proj", form=TRANSPOSED),
        ),
        *norm("final_norm.norm", "transformer.ln_f"),
        *weight("output_layer", "lm_head", when=untied),
    ),
    requirements=(LEARNED, LAYER_NORM, NOT_GATED, BIASES),
    features=frozenset(),
    write=_write,
    read=_read,
    vocab_size=50257,
    tied=True,
    base_prefix="transformer.",
)
"""The table of GPT-2."""
