"""GPT-2: learned positions, LayerNorm, biases everywhere, an activation without a gate.

Its linear layers are Conv1D, which store the weight as [inputs, outputs]; the fused [q | k | v] is
in our order.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import TRANSPOSED, block, linear, norm, untied, weight


def _write(model: ModelConfig) -> dict[str, Any]:
    inner = model.mlp.ffn_hidden_size
    return {
        "n_inner": None if inner == 4 * model.hidden_size else inner,
        "embd_pdrop": model.hidden_dropout,
    }


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("scale_attn_weights", (True,), "attention scores are always scaled")
    given.only(
        "scale_attn_by_inverse_layer_idx", (False,), "all blocks must scale scores in the same way"
    )
    given.only("add_cross_attention", (False,), "cross-attention cannot be represented")
    given.unused(
        "reorder_and_upcast_attn", "n_ctx", "embd_pdrop", "predict_special_tokens", "n_special",
    )  # fmt: skip
    return {}


GPT2 = Architecture(
    title="GPT-2",
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
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
    keys={
        ("n_positions", "max_position_embeddings"): "max_position_embeddings",
        ("n_embd", "hidden_size"): "hidden_size",
        ("n_layer", "num_hidden_layers"): "num_layers",
        ("n_head", "num_attention_heads"): "num_attention_heads",
        "n_inner": "ffn_hidden_size",
        "activation_function": "activation",
        "resid_pdrop": "hidden_dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    write=_write,
    read=_read,
    base_prefix="transformer.",
)
