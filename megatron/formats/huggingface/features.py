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
    assert model.num_attention_heads and model.kv_channels
    return model.num_attention_heads * model.kv_channels == model.hidden_size


def _plain_scores(model: ModelConfig) -> bool:
    return model.query_pre_attn_scalar in (None, model.kv_channels)


# fmt: off
FEATURES: dict[str, Requirement] = {
    "grouped": Requirement(
        lambda m: m.num_query_groups == m.num_attention_heads,
        "--num-query-groups equal to --num-attention-heads"),
    "head_dim": Requirement(
        _heads_fill_width, "--num-attention-heads times --kv-channels equal to --hidden-size"),
    "qkv_bias": Requirement(
        lambda m: m.add_bias_linear or not m.add_qkv_bias, "no --add-qkv-bias"),
    "attention_bias": Requirement(
        lambda m: m.add_bias_linear or not m.add_attention_bias, "no --add-attention-bias"),
    "position_offset": Requirement(
        lambda m: m.position_embedding_offset == 0, "no --position-embedding-offset"),
    "partial_rotary": Requirement(
        lambda m: m.position_embedding_type != "rope" or m.rotary_percent == 1.0,
        "--rotary-percent 1.0"),
    "rope_scaling": Requirement(lambda m: m.rope_scaling is None, "no --rope-scaling"),
    "local_rope": Requirement(
        lambda m: m.rotary_base_local is None or m.sliding_window is None,
        "no --rotary-base-local"),
    "window": Requirement(lambda m: m.sliding_window is None, "no --sliding-window"),
    "window_pattern": Requirement(
        lambda m: m.sliding_window is None or m.window_attn_skip_freq is None,
        "no --window-attn-skip-freq"),
    "query_scalar": Requirement(_plain_scores, "no --query-pre-attn-scalar"),
    "attention_cap": Requirement(
        lambda m: m.attn_logit_softcapping is None, "no --attn-logit-softcapping"),
    "final_cap": Requirement(
        lambda m: m.final_logit_softcapping is None, "no --final-logit-softcapping"),
    "qk_norm": Requirement(lambda m: not m.qk_layernorm, "no --qk-layernorm"),
    "norm_1p": Requirement(lambda m: not m.apply_layernorm_1p, "no --apply-layernorm-1p"),
    "embed_norm": Requirement(lambda m: not m.embed_layernorm, "no --embed-layernorm"),
    "embed_scale": Requirement(lambda m: not m.scale_embeddings, "no --scale-embeddings"),
    "post_norm": Requirement(lambda m: not m.post_norm, "no --post-norm"),
    "parallel": Requirement(lambda m: not m.parallel_residual, "no --parallel-residual"),
    "shared_norm": Requirement(lambda m: not m.shared_parallel_norm, "no --shared-parallel-norm"),
}
"""The features by name, each with what a model without it is like."""
# fmt: on

ROPE = Requirement(lambda m: m.position_embedding_type == "rope", "--position-embedding-type rope")
LEARNED = Requirement(
    lambda m: m.position_embedding_type == "learned_absolute",
    "--position-embedding-type learned_absolute",
)
ALIBI = Requirement(
    lambda m: m.position_embedding_type == "alibi", "--position-embedding-type alibi"
)
LAYER_NORM = Requirement(lambda m: m.normalization == "LayerNorm", "--normalization LayerNorm")
RMS_NORM = Requirement(lambda m: m.normalization == "RMSNorm", "--normalization RMSNorm")
GATED = Requirement(lambda m: m.gated, "--swiglu or --glu-activation")
NOT_GATED = Requirement(lambda m: not m.gated, "no --swiglu and no --glu-activation")
BIASES = Requirement(lambda m: m.add_bias_linear, "no --disable-bias-linear")
NO_BIASES = Requirement(lambda m: not m.add_bias_linear, "--disable-bias-linear")
