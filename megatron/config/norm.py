"""Which norm a network has, and where."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import POSITIVE, option


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Norms: which one, and where."""

    normalization: str = option(
        "LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        spellings={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
        role="weights",
        megatron=True,
    )
    """Normalisation in front of attention, MLP and head."""
    norm_epsilon: float = option(
        1e-5,
        aliases=("--layernorm-epsilon",),
        bounds=POSITIVE,
        megatron=("layernorm_epsilon", "norm_epsilon"),
    )
    """Added to the variance in the norms."""
    apply_layernorm_1p: bool = option(False, role="weights", megatron=True)
    """Norms multiply by 1 + weight, and the weight starts at 0."""
    qk_layernorm: bool = option(False, role="weights", megatron=True)
    """Normalise each head's queries and keys."""
    embed_layernorm: bool = option(False, role="weights", megatron=True)
    """Normalise the embeddings before the first block."""
    post_norm: bool = option(False, role="weights")
    """Normalise also what attention and MLP give, before it is added to the residual stream."""
