"""Decoders with LayerNorm and an ungated MLP: GPT-2, OPT, GPT-NeoX and Pythia, BLOOM, Falcon. All
linear layers have biases; in OPT and Falcon, either all or none."""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import HFConfigReader, read_rope, write_rope
from megatron.formats.huggingface.entries import (
    GROUPED_QKV,
    SEPARATE_QKV,
    TRANSPOSED,
    Entry,
    decoder_entries,
    linear,
    norm,
    weight,
)

_BIASED = {"normalization": "LayerNorm", "add_bias_linear": True}
_MLP = (*linear("mlp.up", "mlp.dense_h_to_4h"), *linear("mlp.down", "mlp.dense_4h_to_h"))
SIZES = {
    "max_position_embeddings": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
}
"""Keys for sizes, in architectures that use the current names."""
_LAST_KEYS = {
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "hidden_dropout",
    "layer_norm_epsilon": "norm_epsilon",
    "initializer_range": "init_method_std",
}
NO_CROSS = "cross-attention cannot be represented"
_NO_POST_NORM = "the residual cannot be normalised"


def write_gpt2(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of GPT-2 and its relatives that have no equivalent flag."""
    inner = model.mlp.ffn_hidden_size
    return {
        "n_inner": None if inner == 4 * model.hidden_size else inner,
        "embd_pdrop": model.hidden_dropout,
    }


def _read_gpt2(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("scale_attn_weights", (True,), "attention scores are always scaled")
    given.only(
        "scale_attn_by_inverse_layer_idx", (False,), "all blocks must scale scores in the same way"
    )
    given.only("add_cross_attention", (False,), NO_CROSS)
    given.unused(
        "reorder_and_upcast_attn", "n_ctx", "embd_pdrop", "predict_special_tokens", "n_special",
    )  # fmt: skip
    return {}


GPT2 = Architecture(
    title="GPT-2",
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    entries=decoder_entries(
        "transformer.wte",
        "transformer.h.{n}",
        "transformer.ln_f",
        norm("attention_norm", "ln_1"),
        linear("attention.qkv", "attn.c_attn", form=TRANSPOSED),
        linear("attention.proj", "attn.c_proj", form=TRANSPOSED),
        norm("mlp_norm", "ln_2"),
        linear("mlp.up", "mlp.c_fc", form=TRANSPOSED),
        linear("mlp.down", "mlp.c_proj", form=TRANSPOSED),
        further=weight("embedding.position_embeddings", "transformer.wpe"),
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
    fixed={"position_embedding_type": "learned_absolute"} | _BIASED,
    write=write_gpt2,
    read=_read_gpt2,
    base_prefix="transformer.",
)
"""GPT-2. Its Conv1D layers store weights as [inputs, outputs]. [q | k | v] is in our order."""


def fairseq_entries(
    base: str, head: str, *positions: Entry, final: str = "layer_norm"
) -> tuple[Entry, ...]:
    """Return a fairseq decoder's entries. fairseq calls a block's second norm the final one."""
    return decoder_entries(
        f"{base}.embed_tokens",
        f"{base}.layers.{{n}}",
        f"{base}.{final}",
        norm("attention_norm", "self_attn_layer_norm"),
        linear("attention.qkv", *(f"self_attn.{name}_proj" for name in "qkv"),
               form=SEPARATE_QKV),
        linear("attention.proj", "self_attn.out_proj"),
        norm("mlp_norm", "final_layer_norm"),
        linear("mlp.up", "fc1"),
        linear("mlp.down", "fc2"),
        further=positions,
        head=head,
    )  # fmt: skip


def _read_opt(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    hidden = fields["hidden_size"]
    given.only("do_layer_norm_before", (True,), "norms must precede attention and MLP")
    given.only(
        "word_embed_proj_dim", (hidden, None),
        f"embeddings must have the width of the hidden states, {hidden}",
    )  # fmt: skip
    given.only("_remove_final_layer_norm", (False,), "the last block must be normalised")
    given.only("layer_norm_elementwise_affine", (True,), "norms must have weights")
    # keys from another model, and from metaseq
    given.unused("activation_dropout", "output_projection")
    given.only("layerdrop", (0, 0.0), "blocks cannot be dropped in training")
    return {}


OPT = Architecture(
    title="OPT",
    model_type="opt",
    model_class="OPTForCausalLM",
    entries=fairseq_entries(
        "model.decoder",
        "lm_head",
        *weight("embedding.position_embeddings", "model.decoder.embed_positions"),
        final="final_layer_norm",
    ),
    keys={
        **SIZES,
        "ffn_dim": "ffn_hidden_size",
        "activation_function": "activation",
        "enable_bias": "add_bias_linear",
        "dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "init_std": "init_method_std",
    },
    fixed={
        "position_embedding_type": "learned_absolute",
        "position_embedding_offset": 2,
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,  # torch.nn.LayerNorm's default, for which config.json has no key
    },
    write=lambda model: {
        "word_embed_proj_dim": model.hidden_size,
        "do_layer_norm_before": True,
        "pad_token_id": None,
    },
    read=_read_opt,
)  # fmt: skip
"""OPT: ReLU, and learned positions that start at row 2."""


def _read_neox(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("attention_bias", (True,), "all linear layers must have biases")
    given.only("is_decoder", (True, False), "it is always a decoder")
    # The 20B model's file has these keys, but transformers reads others.
    given.unused("attention_probs_dropout_prob", "hidden_dropout_prob")
    return read_rope(given, fields, "rotary_emb_base", share_key="rotary_pct", share=0.25)


GPT_NEOX = Architecture(
    title="GPT-NeoX",
    model_type="gpt_neox",
    model_class="GPTNeoXForCausalLM",
    entries=decoder_entries(
        "gpt_neox.embed_in",
        "gpt_neox.layers.{n}",
        "gpt_neox.final_layer_norm",
        norm("attention_norm", "input_layernorm"),
        linear("attention.qkv", "attention.query_key_value", form=GROUPED_QKV),
        linear("attention.proj", "attention.dense"),
        norm("mlp_norm", "post_attention_layernorm"),
        _MLP,
        # transformers 5 calls the head lm_head, but files still have embed_out.
        head="embed_out",
    ),
    keys={
        **SIZES,
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "use_parallel_residual": "parallel_residual",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "hidden_dropout",
        "layer_norm_eps": "norm_epsilon",
        "initializer_range": "init_method_std",
    },
    fixed={"position_embedding_type": "rope"} | _BIASED,
    features=frozenset({"rotary_percent", "rope_scaling"}),
    write=lambda model: {
        "attention_bias": True, **write_rope(model, "rotary_emb_base", "rotary_pct"),
    },
    read=_read_neox,
    base_prefix="gpt_neox.",
    endings={"embed_out.weight": "lm_head.weight"},
)  # fmt: skip
"""GPT-NeoX: only some channels are rotated; attention and MLP are in parallel with a norm each, or
in sequence."""


def _read_bloom(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("apply_residual_connection_post_layernorm", (False,), _NO_POST_NORM)
    # Files of the first releases have these Megatron-DeepSpeed settings, which do not affect the
    # model.
    given.unused(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion",
        "offset_alibi", "pretraining_tp", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
    )  # fmt: skip
    given.only("n_inner", (None, 4 * fields["hidden_size"]), "such an MLP is four times as wide")
    return {}


BLOOM = Architecture(
    title="BLOOM",
    model_type="bloom",
    model_class="BloomForCausalLM",
    entries=decoder_entries(
        "transformer.word_embeddings",
        "transformer.h.{n}",
        "transformer.ln_f",
        norm("attention_norm", "input_layernorm"),
        linear("attention.qkv", "self_attention.query_key_value", form=GROUPED_QKV),
        linear("attention.proj", "self_attention.dense"),
        norm("mlp_norm", "post_attention_layernorm"),
        _MLP,
        further=norm("embedding.norm", "transformer.word_embeddings_layernorm"),
    ),
    keys={
        # ALiBi does not limit the sequence length. This is the length used in training, if known.
        "seq_length": "max_position_embeddings",
        ("hidden_size", "n_embed"): "hidden_size",
        ("n_layer", "num_hidden_layers"): "num_layers",
        ("n_head", "num_attention_heads"): "num_attention_heads",
        **_LAST_KEYS,
    },
    fixed={"position_embedding_type": "alibi"} | _BIASED | {"embed_layernorm": True},
    requirements=(
        Requirement(lambda m: m.mlp.activation == "gelu_tanh", "GELU by the tanh approximation"),
        Requirement(
            lambda m: m.mlp.ffn_hidden_size == 4 * m.hidden_size,
            "--ffn-hidden-size four times --hidden-size",
        ),
    ),
    read=_read_bloom,
    defaults={"seq_length": 2048},
    base_prefix="transformer.",
)
"""BLOOM: ALiBi, a norm after the embeddings, tanh-approximated GELU, and an MLP that is four times
as wide as the hidden states."""


def _two_norms(model: ModelConfig) -> bool:
    """Return whether attention and MLP are in parallel with a norm each."""
    return model.parallel_residual and not model.shared_parallel_norm


def _shared_or_each(model: ModelConfig) -> bool:
    """Return whether one key and value head serves all queries, or each query head has its own. The
    old form of Falcon's block supports nothing else."""
    return model.attention.num_query_groups in (1, model.attention.num_attention_heads)


def _write_falcon(model: ModelConfig) -> dict[str, Any]:
    new = _two_norms(model) or not _shared_or_each(model)
    attention = model.attention
    multi_query = attention.num_query_groups == 1 and not new
    heads = attention.num_attention_heads
    return {
        # ignored by transformers if there is a single key and value head
        "num_kv_heads": heads if multi_query else attention.num_query_groups,
        "alibi": False,
        "new_decoder_architecture": new,
        "multi_query": multi_query or new,  # ignored in the new form of the block
        **write_rope(model),
        **({"num_ln_in_parallel_attn": 2 if _two_norms(model) else 1} if new else {}),
    }


def _read_falcon(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only(
        "alibi", (False,), "transformers divides the biases of Falcon's ALiBi by the square root "
        "of the head width and rounds them to bfloat16, which no flag can express",
    )  # fmt: skip
    given.only("apply_residual_connection_post_layernorm", (False,), _NO_POST_NORM)
    given.unused("ff_factor")  # a key that the 11B model has
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
    entries=decoder_entries(
        "transformer.word_embeddings",
        "transformer.h.{n}",
        "transformer.ln_f",
        norm("attention_norm", "input_layernorm", when=lambda m: not _two_norms(m)),
        norm("attention_norm", "ln_attn", when=_two_norms),
        linear("attention.qkv", "self_attention.query_key_value", form=GROUPED_QKV),
        linear("attention.proj", "self_attention.dense"),
        norm("mlp_norm", "post_attention_layernorm", when=lambda m: not m.parallel_residual),
        norm("mlp_norm", "ln_mlp", when=_two_norms),
        _MLP,
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
        **_LAST_KEYS,
    },
    fixed={"position_embedding_type": "rope", "normalization": "LayerNorm"},
    features=frozenset({"num_query_groups", "rope_scaling", "shared_parallel_norm"}),
    requirements=(
        Requirement(
            lambda m: m.parallel_residual or _shared_or_each(m),
            "--parallel-residual, or --num-query-groups 1 or equal to --num-attention-heads",
        ),
    ),
    write=_write_falcon,
    read=_read_falcon,
    base_prefix="transformer.",
)
"""Falcon, with three forms of the block:

- 7B: one key and value head, or one for each query head. Attention and MLP are in parallel after
  one norm, or in sequence (``parallel_attn``).
- 40B (``new_decoder_architecture``): grouped queries. Attention and MLP are in parallel with a norm
  each, or after one norm (11B, ``num_ln_in_parallel_attn`` 1).
"""
