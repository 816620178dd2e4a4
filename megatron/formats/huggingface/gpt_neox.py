"""GPT-NeoX and Pythia: LayerNorm, biases everywhere, part of each head rotated, attention and MLP
side by side with a norm each, or one behind the other."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import BIASES, LAYER_NORM, NOT_GATED, ROPE
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
from megatron.formats.huggingface.reorder import GROUPED_QKV
from megatron.formats.huggingface.rope import read_rope, write_rope
from megatron.formats.huggingface.settings import HFConfigReader
from megatron.formats.huggingface.table import Architecture


def _write(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model, "rotary_emb_base")
    rope["rope_parameters"]["partial_rotary_factor"] = model.positions.rotary_percent
    return {
        "max_position_embeddings": model.positions.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_attention_heads,
        "hidden_act": ACTIVATION_NAMES[model.mlp.activation],
        "attention_bias": True,
        "use_parallel_residual": model.parallel_residual,
        "attention_dropout": model.attention.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "layer_norm_eps": model.norm.norm_epsilon,
        "initializer_range": model.init_method_std,
        "rotary_pct": model.positions.rotary_percent,
        **rope,
    }


def _read(given: HFConfigReader) -> dict[str, Any]:
    given.only("attention_bias", (True,), "here all linear layers have biases or none has")
    given.only("is_decoder", (True, False), "it is always a decoder")
    hidden = given.whole("hidden_size", 6144)
    heads = given.whole("num_attention_heads", 64)
    width = head_width(given, hidden, heads)
    positions = given.whole("max_position_embeddings", 2048)
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": given.whole("intermediate_size", 24576),
        "num_layers": given.whole("num_hidden_layers", 44),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": width,
        "max_position_embeddings": positions,
        "parallel_residual": given.flag("use_parallel_residual", True),
        "norm_epsilon": given.number("layer_norm_eps", 1e-5),
        "hidden_dropout": given.number("hidden_dropout", 0.0),
        "attention_dropout": given.number("attention_dropout", 0.0),
        "init_method_std": given.number("initializer_range", 0.02),
        **given.choice("hidden_act", "gelu", ACTIVATIONS),
        **read_rope(
            given, width, positions, 10000.0, "rotary_emb_base", share_key="rotary_pct", share=0.25
        ),
    }


GPT_NEOX = Architecture(
    title="GPT-NeoX",
    model_type="gpt_neox",
    causal_lm="GPTNeoXForCausalLM",
    entries=(
        *weight("embedding.word_embeddings", "gpt_neox.embed_in"),
        *block(
            "gpt_neox.layers.{n}",
            norm("attention_norm", "input_layernorm"),
            linear("attention.qkv", "attention.query_key_value", form=GROUPED_QKV),
            linear("attention.proj", "attention.dense"),
            norm("mlp_norm", "post_attention_layernorm"),
            linear("mlp.up", "mlp.dense_h_to_4h"),
            linear("mlp.down", "mlp.dense_4h_to_h"),
        ),
        *norm("final_norm.norm", "gpt_neox.final_layer_norm"),
        # transformers 5 calls it lm_head, but in files it is embed_out still.
        *weight("output_layer", "embed_out", when=untied),
    ),
    requirements=(ROPE, LAYER_NORM, NOT_GATED, BIASES),
    features=frozenset({"partial_rotary", "rope_scaling", "parallel"}),
    write=_write,
    read=_read,
    vocab_size=50432,
    tied=False,
    base_prefix="gpt_neox.",
)
"""The table of GPT-NeoX."""
