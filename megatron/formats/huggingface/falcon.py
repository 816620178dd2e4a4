"""Falcon: LayerNorm, biases everywhere or nowhere, and three forms of the block.

- 7B: one key and value head (or one for each query head); attention and MLP side by side from one
  norm, or one behind the other (``parallel_attn``).
- 40B (``new_decoder_architecture``): groups of query heads; side by side from a norm each, or from
  one norm (11B, ``num_ln_in_parallel_attn`` 1).

Those with ``alibi`` (RW) are refused: in `transformers` their biases are divided by the root of the
head width and rounded to bfloat16, and no flag of ours means that.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.huggingface.features import LAYER_NORM, NOT_GATED, ROPE, Requirement
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


def _two_norms(model: ModelConfig) -> bool:
    """Side by side, from a norm each."""
    return model.parallel_residual and not model.shared_parallel_norm


def _one_norm(model: ModelConfig) -> bool:
    return not _two_norms(model)


def _sequential(model: ModelConfig) -> bool:
    return not model.parallel_residual


def _shared_or_each(model: ModelConfig) -> bool:
    """Whether the first form can say how key and value heads are shared."""
    return model.attention.num_query_groups in (1, model.attention.num_attention_heads)


def _new(model: ModelConfig) -> bool:
    return _two_norms(model) or not _shared_or_each(model)


def _write(model: ModelConfig) -> dict[str, Any]:
    multi_query = model.attention.num_query_groups == 1 and not _new(model)
    keys = {
        "max_position_embeddings": model.positions.max_position_embeddings,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.mlp.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_attention_heads,
        # Not read where one head serves all queries.
        "num_kv_heads": model.attention.num_attention_heads
        if multi_query
        else model.attention.num_query_groups,
        "activation": ACTIVATION_NAMES[model.mlp.activation],
        "alibi": False,
        "bias": model.mlp.bias,
        "new_decoder_architecture": _new(model),
        "parallel_attn": model.parallel_residual,
        "multi_query": multi_query or _new(model),  # not read in the second form
        "attention_dropout": model.attention.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "layer_norm_epsilon": model.norm.norm_epsilon,
        "initializer_range": model.init_method_std,
        **write_rope(model),
    }
    if _new(model):
        keys["num_ln_in_parallel_attn"] = 2 if _two_norms(model) else 1
    return keys


def _read(given: HFConfigReader) -> dict[str, Any]:
    given.only(
        "alibi", (False,), "transformers divides the biases of Falcon's ALiBi by the root of the "
        "head width and rounds them to bfloat16, which no flag here means",
    )  # fmt: skip
    given.only(
        "apply_residual_connection_post_layernorm", (False,), "here the residual is not normalised"
    )
    hidden = given.whole(("hidden_size", "n_embed"), 4544)
    heads = given.whole("num_attention_heads", 71)
    width = head_width(given, hidden, heads)
    positions = given.whole("max_position_embeddings", 2048)
    new = given.flag("new_decoder_architecture", False)
    parallel = given.flag("parallel_attn", True)
    multi_query = given.flag("multi_query", True)
    groups = given.optional_whole("num_kv_heads") or heads
    if not new:
        if not multi_query and groups != heads:
            given.refuse(
                "num_kv_heads", groups, f"without multi_query it must be the {heads} query heads"
            )
        groups = 1 if multi_query else heads
    norms = given.optional_whole("num_ln_in_parallel_attn") or (2 if new else 1)
    if norms != 1 and not (new and norms == 2):
        given.refuse("num_ln_in_parallel_attn", norms, "such blocks have no such norms")
    if new and not parallel:
        given.refuse("parallel_attn", parallel, "new_decoder_architecture is always parallel")
    if heads % groups:
        given.refuse("num_kv_heads", groups, f"it must divide num_attention_heads {heads}")
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": given.optional_whole("ffn_hidden_size") or 4 * hidden,
        "num_layers": given.whole("num_hidden_layers", 32),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": width,
        "max_position_embeddings": positions,
        "parallel_residual": parallel,
        "shared_parallel_norm": parallel and norms == 1,
        "add_bias_linear": given.flag("bias", False),
        "norm_epsilon": given.number("layer_norm_epsilon", 1e-5),
        "hidden_dropout": given.number("hidden_dropout", 0.0),
        "attention_dropout": given.number("attention_dropout", 0.0),
        "init_method_std": given.number("initializer_range", 0.02),
        **given.choice("activation", "gelu", ACTIVATIONS),
        **read_rope(given, width, positions, 10000.0),
    }


FALCON = Architecture(
    title="Falcon",
    model_type="falcon",
    causal_lm="FalconForCausalLM",
    entries=(
        *weight("embedding.word_embeddings", "transformer.word_embeddings"),
        *block(
            "transformer.h.{n}",
            norm("attention_norm", "input_layernorm", when=_one_norm),
            norm("attention_norm", "ln_attn", when=_two_norms),
            linear("attention.qkv", "self_attention.query_key_value", form=GROUPED_QKV),
            linear("attention.proj", "self_attention.dense"),
            norm("mlp_norm", "post_attention_layernorm", when=_sequential),
            norm("mlp_norm", "ln_mlp", when=_two_norms),
            linear("mlp.up", "mlp.dense_h_to_4h"),
            linear("mlp.down", "mlp.dense_4h_to_h"),
        ),
        *norm("final_norm.norm", "transformer.ln_f"),
        *weight("output_layer", "lm_head", when=untied),
    ),
    requirements=(
        ROPE,
        LAYER_NORM,
        NOT_GATED,
        Requirement(
            lambda m: m.parallel_residual or _shared_or_each(m),
            "--parallel-residual, or --num-query-groups 1 or equal to --num-attention-heads",
        ),
    ),
    features=frozenset({"grouped", "rope_scaling", "parallel", "shared_norm"}),
    write=_write,
    read=_read,
    vocab_size=65024,
    tied=True,
    base_prefix="transformer.",
)
"""The table of Falcon."""
