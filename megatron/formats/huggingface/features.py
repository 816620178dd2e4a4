"""What a network can have beyond the plain pre-norm transformer; each architecture says which of
these its models may have, and a configuration with another does not fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config import ModelConfig


@dataclass(frozen=True)
class Requirement:
    """A condition on a configuration.

    Attributes:
        holds: whether a model fulfils it.
        wanted: the flags that do.
    """

    holds: Callable[[ModelConfig], bool]
    wanted: str


def _heads_fill_width(model: ModelConfig) -> bool:
    return model.attention.num_attention_heads * model.attention.kv_channels == model.hidden_size


# fmt: off
FEATURES: dict[str, Requirement] = {
    "grouped": Requirement(
        lambda m: m.attention.num_query_groups == m.attention.num_attention_heads,
        "--num-query-groups equal to --num-attention-heads"),
    "head_dim": Requirement(
        _heads_fill_width, "--num-attention-heads times --kv-channels equal to --hidden-size"),
    "qkv_bias": Requirement(
        lambda m: m.attention.qkv_bias == m.attention.proj_bias, "no --add-qkv-bias"),
    "attention_bias": Requirement(
        lambda m: m.attention.proj_bias == m.mlp.bias, "no --add-attention-bias"),
    "position_offset": Requirement(
        lambda m: m.positions.position_embedding_offset == 0, "no --position-embedding-offset"),
    "partial_rotary": Requirement(
        lambda m: m.positions.position_embedding_type != "rope"
        or m.positions.rotary_percent == 1.0,
        "--rotary-percent 1.0"),
    "rope_scaling": Requirement(lambda m: m.positions.rope_scaling.is_default, "no --rope-scaling"),
    "local_rope": Requirement(
        lambda m: m.positions.rotary_base_local is None or m.attention.sliding_window is None,
        "no --rotary-base-local"),
    "window": Requirement(lambda m: m.attention.sliding_window is None, "no --sliding-window"),
    "window_pattern": Requirement(
        lambda m: m.attention.sliding_window is None or m.attention.window_attn_skip_freq is None,
        "no --window-attn-skip-freq"),
    "query_scalar": Requirement(
        lambda m: m.attention.query_pre_attn_scalar == m.attention.kv_channels,
        "no --query-pre-attn-scalar"),
    "attention_cap": Requirement(
        lambda m: m.attention.attn_logit_softcapping is None, "no --attn-logit-softcapping"),
    "final_cap": Requirement(
        lambda m: m.embedding.final_logit_softcapping is None, "no --final-logit-softcapping"),
    "qk_norm": Requirement(lambda m: not m.norm.qk_layernorm, "no --qk-layernorm"),
    "norm_1p": Requirement(lambda m: not m.norm.apply_layernorm_1p, "no --apply-layernorm-1p"),
    "embed_norm": Requirement(lambda m: not m.norm.embed_layernorm, "no --embed-layernorm"),
    "embed_scale": Requirement(lambda m: not m.embedding.scale_embeddings, "no --scale-embeddings"),
    "post_norm": Requirement(lambda m: not m.norm.post_norm, "no --post-norm"),
    "parallel": Requirement(lambda m: not m.parallel_residual, "no --parallel-residual"),
    "shared_norm": Requirement(lambda m: not m.shared_parallel_norm, "no --shared-parallel-norm"),
}
"""The features by name, each with what a model without it is like."""
# fmt: on

ROPE = Requirement(
    lambda m: m.positions.position_embedding_type == "rope", "--position-embedding-type rope"
)
LEARNED = Requirement(
    lambda m: m.positions.position_embedding_type == "learned_absolute",
    "--position-embedding-type learned_absolute",
)
ALIBI = Requirement(
    lambda m: m.positions.position_embedding_type == "alibi", "--position-embedding-type alibi"
)
LAYER_NORM = Requirement(lambda m: m.norm.normalization == "LayerNorm", "--normalization LayerNorm")
RMS_NORM = Requirement(lambda m: m.norm.normalization == "RMSNorm", "--normalization RMSNorm")
GATED = Requirement(lambda m: m.mlp.gated, "--swiglu or --glu-activation")
NOT_GATED = Requirement(lambda m: not m.mlp.gated, "no --swiglu and no --glu-activation")
BIASES = Requirement(lambda m: m.mlp.bias, "no --disable-bias-linear")
NO_BIASES = Requirement(lambda m: not m.mlp.bias, "--disable-bias-linear")
