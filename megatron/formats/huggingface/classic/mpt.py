"""MPT: ALiBi, no biases at all, and exact GELU in an MLP of four times the hidden width."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import decoder_entries, linear, norm

_ATTENTION = {
    "attn_pdrop": 0, "clip_qkv": None, "softmax_scale": None, "attn_type": "multihead_attention",
}  # fmt: skip
"""Keys of ``attn_config`` that affect the model, with their default values."""


def _power(value: float, exponent: float) -> float:
    """Return a power, rounded to 14 digits so that the inverse power restores ``value``."""
    return float(f"{value**exponent:.14g}")


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("expansion_ratio", (4,), "such an MLP is four times as wide")
    given.only("no_bias", (True,), "linear layers and norms must have no biases")
    given.only("logit_scale", (None,), "transformers does not scale the logits of such models")
    given.only("embedding_fraction", (1,), "transformers does not read it")
    given.only("norm_type", ("low_precision_layernorm", "layernorm"), "norms must be LayerNorm")
    # Initialisation and logging of the original code, and learned positions, which MPT uses only
    # without ALiBi.
    given.unused("emb_pdrop", "resid_pdrop", "init_device", "init_config", "verbose",
                 "learned_pos_emb", "loss_fn", "tokenizer_name")  # fmt: skip
    nested = HFConfigReader(
        given.table("attn_config"), given.path, "MPT's attn_config", "mpt", _ATTENTION
    )
    nested.only("attn_type", (_ATTENTION["attn_type"],), "each head must have its keys")
    for name, value in (
        ("alibi", True), ("alibi_bias_max", 8), ("prefix_lm", False), ("qk_ln", False),
        ("attn_uses_sequence_id", False),
    ):  # fmt: skip
        nested.only(name, (value,), f"such models of transformers compute as if it were {value}")
    nested.unused("attn_impl", "transformers_version")
    dropout, read = nested.number("attn_pdrop"), dict[str, Any]()
    for name in ("clip_qkv", "softmax_scale"):
        number = nested.content.get(name)
        nested.unused(name)
        read[name] = number if number is None else nested.number(name)
        if number is not None and read[name] <= 0:
            nested.refuse(name, number, "expected a positive number")
    nested.refuse_the_rest()
    scale = read["softmax_scale"]
    return {
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "clip_qkv": read["clip_qkv"],
        "query_pre_attn_scalar": None if scale is None else _power(scale, -2),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    attention = model.attention
    usual = attention.query_pre_attn_scalar == attention.kv_channels
    return {
        "attn_config": _ATTENTION | {  # transformers requires an integer dropout here
            "clip_qkv": attention.clip_qkv,
            "softmax_scale": None if usual else _power(attention.query_pre_attn_scalar, -0.5),
        },
        "expansion_ratio": 4,
        "no_bias": True,
    }  # fmt: skip


MPT = Architecture(
    title="MPT",
    model_type="mpt",
    model_class="MptForCausalLM",
    entries=decoder_entries(
        "transformer.wte",
        "transformer.blocks.{n}",
        "transformer.norm_f",
        norm("attention_norm", "norm_1"),
        linear("attention.qkv", "attn.Wqkv"),
        linear("attention.proj", "attn.out_proj"),
        norm("mlp_norm", "norm_2"),
        linear("mlp.up", "ffn.up_proj"),
        linear("mlp.down", "ffn.down_proj"),
    ),
    keys={
        "max_seq_len": "max_position_embeddings",
        ("d_model", "hidden_size"): "hidden_size",
        ("n_layers", "num_hidden_layers"): "num_layers",
        ("n_heads", "num_attention_heads"): "num_attention_heads",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={
        "position_embedding_type": "alibi", "normalization": "UnbiasedLayerNorm",
        "add_bias_linear": False, "bias_gelu_fusion": False,
    },
    features=frozenset({"clip_qkv", "query_pre_attn_scalar"}),
    requirements=(
        Requirement(lambda m: m.mlp.activation == "gelu_erf", "--no-bias-gelu-fusion alone"),
        Requirement(
            lambda m: m.mlp.ffn_hidden_size == 4 * m.hidden_size,
            "--ffn-hidden-size four times --hidden-size",
        ),
    ),
    write=_write,
    read=_read,
    base_prefix="transformer.",
)  # fmt: skip
