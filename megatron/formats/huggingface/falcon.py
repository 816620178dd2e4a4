"""Falcon: LayerNorm, biases everywhere or nowhere, and three forms of the block.

- 7B: one key and value head (or one for each query head); attention and MLP in parallel from one
  norm, or in sequence (``parallel_attn``).
- 40B (``new_decoder_architecture``): groups of query heads; in parallel from a norm each, or from
  one norm (11B, ``num_ln_in_parallel_attn`` 1).

Those with ``alibi`` (RW) are refused: `transformers` divides their biases by the square root of the
head width and rounds them to bfloat16, and no flag of ours means that.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader
from megatron.formats.huggingface.entries import GROUPED_QKV, block, linear, norm, untied, weight
from megatron.formats.huggingface.rope_and_windows import read_rope, write_rope


def _two_norms(model: ModelConfig) -> bool:
    """In parallel, from a norm each."""
    return model.parallel_residual and not model.shared_parallel_norm


def _one_norm(model: ModelConfig) -> bool:
    return not _two_norms(model)


def _sequential(model: ModelConfig) -> bool:
    return not model.parallel_residual


def _shared_or_each(model: ModelConfig) -> bool:
    """Whether the first form can express how key and value heads are shared."""
    return model.attention.num_query_groups in (1, model.attention.num_attention_heads)


def _write(model: ModelConfig) -> dict[str, Any]:
    new = _two_norms(model) or not _shared_or_each(model)
    attention = model.attention
    multi_query = attention.num_query_groups == 1 and not new
    heads = attention.num_attention_heads
    return {
        # Not read where one head serves all queries.
        "num_kv_heads": heads if multi_query else attention.num_query_groups,
        "alibi": False,
        "new_decoder_architecture": new,
        "multi_query": multi_query or new,  # not read in the second form
        **write_rope(model),
        **({"num_ln_in_parallel_attn": 2 if _two_norms(model) else 1} if new else {}),
    }


def _read(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only(
        "alibi", (False,), "transformers divides the biases of Falcon's ALiBi by the square root "
        "of the head width and rounds them to bfloat16, which no flag can express",
    )  # fmt: skip
    given.only(
        "apply_residual_connection_post_layernorm", (False,), "the residual cannot be normalised"
    )
    given.unused("ff_factor")  # in the file of the model of 11 billion parameters
    heads, parallel = fields["num_attention_heads"], fields["parallel_residual"]
    new, multi_query = given.flag("new_decoder_architecture"), given.flag("multi_query")
    groups = given.optional_whole("num_kv_heads") or heads
    if not new:
        if not multi_query and groups != heads:
            given.refuse(
                "num_kv_heads", groups, f"without multi_query it must be the {heads} query heads"
            )
        groups = 1 if multi_query else heads
    norms = given.optional_whole("num_ln_in_parallel_attn") or (2 if new else 1)
    if norms != 1 and not (new and norms == 2):
        given.refuse("num_ln_in_parallel_attn", norms, "such blocks do not have that many norms")
    if new and not parallel:
        given.refuse("parallel_attn", parallel, "new_decoder_architecture is always parallel")
    if heads % groups:
        given.refuse("num_kv_heads", groups, f"it must divide num_attention_heads {heads}")
    return {
        "num_query_groups": groups,
        "shared_parallel_norm": parallel and norms == 1,
        **read_rope(given, fields),
    }


FALCON = Architecture(
    title="Falcon",
    model_type="falcon",
    model_class="FalconForCausalLM",
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
    keys={
        "max_position_embeddings": "max_position_embeddings",
        ("hidden_size", "n_embed"): "hidden_size",
        "ffn_hidden_size": "ffn_hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "activation": "activation",
        "bias": "add_bias_linear",
        "parallel_attn": "parallel_residual",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "layer_norm_epsilon": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={"position_embedding_type": "rope", "normalization": "LayerNorm"},
    features=frozenset({"num_query_groups", "rope_scaling", "shared_parallel_norm"}),
    requirements=(
        Requirement(
            lambda m: m.parallel_residual or _shared_or_each(m),
            "--parallel-residual, or --num-query-groups 1 or equal to --num-attention-heads",
        ),
    ),
    write=_write,
    read=_read,
    base_prefix="transformer.",
)
