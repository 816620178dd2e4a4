"""Decoders with LayerNorm, an ungated MLP, and position embeddings that are added to the token
embeddings: GPTBigCode (SantaCoder, StarCoder), GPT-Neo, BioGPT and XGLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.config import ModelConfig
from megatron.config.patterns import but_every_last, shortest
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import (
    GROUPED_QKV,
    SEPARATE_QKV,
    TABLE,
    Entry,
    attention_biased,
    decoder_entries,
    linear,
    norm,
    qkv_biased,
    untied,
    weight,
)
from megatron.formats.huggingface.layer_norm_decoders import (
    GPT2,
    NO_CROSS,
    SIZES,
    fairseq_entries,
    write_gpt2,
)

_LEARNED = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}


def _gpt2_entries(*qkv: Sequence[Entry], proj: str) -> tuple[Entry, ...]:
    """Return GPT-2's entries with other attention entries, and with no tensor transposed."""
    return decoder_entries(
        "transformer.wte",
        "transformer.h.{n}",
        "transformer.ln_f",
        norm("attention_norm", "ln_1"),
        *qkv,
        linear("attention.proj", proj, bias=attention_biased),
        norm("mlp_norm", "ln_2"),
        linear("mlp.up", "mlp.c_fc"),
        linear("mlp.down", "mlp.c_proj"),
        further=weight("embedding.position_embeddings", "transformer.wpe"),
    )


def _multi_query(model: ModelConfig) -> bool:
    return model.attention.num_query_groups == 1


def _in_two_orders() -> tuple[Entry, ...]:
    """Return the entries for GPTBigCode's fused projection. Its rows are grouped by head, unless
    all queries share one key and value head."""
    entries = linear("attention.qkv", "attn.c_attn")
    by_head = linear("attention.qkv", "attn.c_attn", form=GROUPED_QKV)
    return (
        *(replace(entry, when=_multi_query) for entry in entries),
        *(replace(entry, when=lambda model: not _multi_query(model)) for entry in by_head),
    )


def _read_bigcode(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    multi_query = given.flag("multi_query")
    groups = 1 if multi_query else fields["num_attention_heads"]
    given.only("num_key_value_heads", (groups,), f"multi_query is {multi_query}")
    given.only("scale_attn_weights", (True,), "attention scores are always scaled")
    given.only("add_cross_attention", (False,), NO_CROSS)
    # The dtype of attention scores, and settings for kernels and buffers of the original code.
    given.unused(
        "embd_pdrop", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
        "inference_runner", "validate_runner_input", "pre_allocate_kv_cache",
        "max_sequence_length", "max_batch_size", "pad_key_length",
    )  # fmt: skip
    return {"num_query_groups": groups}


def _write_bigcode(model: ModelConfig) -> dict[str, Any]:
    groups = model.attention.num_query_groups
    return {"multi_query": groups == 1, "num_key_value_heads": groups, **write_gpt2(model)}


GPT_BIGCODE = Architecture(
    title="GPTBigCode",
    model_type="gpt_bigcode",
    model_class="GPTBigCodeForCausalLM",
    entries=_gpt2_entries(_in_two_orders(), proj="attn.c_proj"),
    keys=GPT2.keys,
    fixed=GPT2.fixed,
    features=frozenset({"num_query_groups"}),
    requirements=(
        Requirement(
            lambda m: m.attention.num_query_groups in (1, m.attention.num_attention_heads),
            "--num-query-groups 1 or equal to --num-attention-heads",
        ),
    ),
    write=_write_bigcode,
    read=_read_bigcode,
    base_prefix="transformer.",
)
"""GPT-2 with multi-query attention (one key and value head) or plain multi-head attention."""


_LOCAL = {"global": False, "local": True}


def _expanded(given: HFConfigReader, layers: int) -> tuple[bool, ...]:
    """Return, for each block of a GPT-Neo, whether its attention has a window."""
    kinds = given.names("attention_layers")
    types = given.content.get("attention_types") or [[["global", "local"], layers // 2]]
    given.unused("attention_types")
    try:
        listed = [kind for names, count in types for kind in list(names) * count]
        chosen = tuple(_LOCAL[kind] for kind in listed)
    except (TypeError, ValueError, KeyError):
        given.refuse("attention_types", types, f"expected lists of {', '.join(_LOCAL)}, counted")
    if kinds not in (None, listed):
        given.refuse("attention_layers", kinds, f"attention_types says {listed}")
    if len(chosen) != layers:
        given.refuse("attention_types", types, f"there are {layers} blocks, not {len(chosen)}")
    return chosen


def _read_neo(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.unused("embed_dropout")
    window, chosen = given.whole("window_size"), _expanded(given, fields["num_layers"])
    if not any(chosen):
        return {"sliding_window": None}
    every = None if all(chosen) else shortest(chosen, but_every_last)
    return {"sliding_window": window, "window_attn_skip_freq": every}


def _write_neo(model: ModelConfig) -> dict[str, Any]:
    kinds = ["global" if window is None else "local" for window in model.windows]
    return {
        "window_size": model.attention.sliding_window or 256,
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "embed_dropout": model.hidden_dropout,
        "intermediate_size": write_gpt2(model)["n_inner"],
    }


GPT_NEO = Architecture(
    title="GPT-Neo",
    model_type="gpt_neo",
    model_class="GPTNeoForCausalLM",
    entries=_gpt2_entries(
        linear(
            "attention.qkv",
            *(f"attn.attention.{name}_proj" for name in "qkv"),
            form=SEPARATE_QKV,
            bias=qkv_biased,
        ),
        proj="attn.attention.out_proj",
    ),
    keys={
        "max_position_embeddings": "max_position_embeddings",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        ("num_layers", "num_hidden_layers"): "num_layers",
        ("num_heads", "num_attention_heads"): "num_attention_heads",
        "activation_function": "activation",
        "attention_dropout": "attention_dropout",
        "resid_dropout": "hidden_dropout",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed=_LEARNED | {
        "add_bias_linear": False, "add_proj_bias": True, "add_mlp_bias": True,
        "query_pre_attn_scalar": 1.0,
    },
    features=frozenset({"sliding_window", "window_attn_skip_freq"}),
    write=_write_neo,
    read=_read_neo,
    base_prefix="transformer.",
)  # fmt: skip
"""GPT-Neo: unscaled attention scores, a window in blocks of the kind ``local``, and no biases on
queries, keys and values."""


_FAIRSEQ = {"add_bias_linear": True, "position_embedding_offset": 2, "norm_epsilon": 1e-5}
"""Fields of decoders from fairseq. config.json has no key for the epsilon, torch.nn.LayerNorm's
default."""


def _read_fairseq(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("layerdrop", (0, 0.0), "blocks cannot be dropped in training")
    given.only("activation_dropout", (0, 0.0), "the MLP has no dropout of its own")
    given.only("add_cross_attention", (False,), NO_CROSS)
    given.unused("layer_norm_eps")  # transformers ignores this key.
    return {}


BIOGPT = Architecture(
    title="BioGPT",
    model_type="biogpt",
    model_class="BioGptForCausalLM",
    entries=fairseq_entries(
        "biogpt",
        "output_projection",
        *weight("embedding.position_embeddings", "biogpt.embed_positions"),
    ),
    keys={
        **SIZES,
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "scale_embedding": "scale_embeddings",
        "hidden_dropout_prob": "hidden_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "init_method_std",
    },
    fixed=_LEARNED | _FAIRSEQ,
    write=lambda model: {"pad_token_id": None},
    read=_read_fairseq,
    base_prefix="biogpt.",
    copies=lambda model: {} if untied(model) else {"output_projection.weight": TABLE},
)
"""BioGPT: learned positions that start at row 2, scaled embeddings, and exact GELU."""


def _read_xglm(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    pad = given.content.get("pad_token_id")
    if isinstance(pad, int) and pad >= 2:
        given.refuse("pad_token_id", pad, f"transformers gives position {pad - 2} no embedding")
    return _read_fairseq(given, fields)


XGLM = Architecture(
    title="XGLM",
    model_type="xglm",
    model_class="XGLMForCausalLM",
    entries=fairseq_entries("model", "lm_head"),
    keys={
        "max_position_embeddings": "max_position_embeddings",
        ("d_model", "hidden_size"): "hidden_size",
        "ffn_dim": "ffn_hidden_size",
        ("num_layers", "num_hidden_layers"): "num_layers",
        ("attention_heads", "num_attention_heads"): "num_attention_heads",
        "activation_function": "activation",
        "scale_embedding": "scale_embeddings",
        "dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "init_std": "init_method_std",
    },
    fixed={**BIOGPT.fixed, "position_embedding_type": "sinusoidal"},
    write=lambda model: {"pad_token_id": None},
    read=_read_xglm,
    rewards=False,  # transformers has no reward class
)
"""XGLM: BioGPT with sinusoidal positions."""
