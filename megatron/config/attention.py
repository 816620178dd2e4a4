"""Attention: heads, what a query sees, how scores are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flags import FRACTION, POSITIVE, option
from megatron.config.resolver import ConfigResolver, shared


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """What is resolved as it is given."""

    sliding_window: int | None = option(None, bounds=POSITIVE, role="results")
    """Tokens that a query sees, itself included; all before it without this."""
    window_attn_skip_freq: int | None = option(None, bounds=POSITIVE, role="results")
    """Every N-th block sees all tokens, in spite of --sliding-window."""
    attn_logit_softcapping: float | None = option(None, bounds=POSITIVE, role="results")
    """Bend attention scores x to c * tanh(x / c), with this c."""
    attention_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability on attention weights."""
    attention_backend: str = option(
        "sdpa",
        choices=("sdpa", "cudnn", "eager", "flash"),
        spellings={"auto": "sdpa", "fused": "cudnn", "unfused": "eager", "local": "eager"},
    )
    """Attention kernel: torch's scaled_dot_product_attention with the kernel that torch chooses, or
    with cuDNN's before others, plain matrix products, or the flash-attn package (documents, ALiBi
    and bent scores go to torch's kernel). No fused kernel bends scores: with
    --attn-logit-softcapping it is plain matrix products. Megatron's auto is sdpa, fused is cudnn,
    unfused and local are eager."""


@dataclass(frozen=True, kw_only=True)
class AttentionFlags(_Attention):
    """Attention."""

    num_attention_heads: int | None = option(None, bounds=POSITIVE, role="weights", megatron=True)
    """Number of query heads."""
    group_query_attention: bool = option(False)
    """Share key and value heads among groups of query heads."""
    num_query_groups: int | None = option(
        None,
        aliases=("--num-key-value-heads",),
        derived="num-attention-heads; 1 with --group-query-attention",
        bounds=POSITIVE,
        role="weights",
    )
    """Number of key and value heads."""
    kv_channels: int | None = option(
        None,
        derived="hidden-size / num-attention-heads",
        bounds=POSITIVE,
        role="weights",
        megatron=True,
    )
    """Width of one head."""
    query_pre_attn_scalar: float | None = option(
        None, derived="kv-channels", bounds=POSITIVE, role="results"
    )
    """Attention scores are divided by the square root of this."""
    add_qkv_bias: bool = option(False, role="weights", megatron=True)
    """Keep a bias on query, key and value even with --disable-bias-linear."""
    add_attention_bias: bool = option(False, role="weights")
    """Keep the biases of attention, on query, key, value and output, with --disable-bias-linear."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(_Attention):
    """Attention of a block.

    Attributes:
        num_attention_heads: query heads.
        num_query_groups: key and value heads.
        kv_channels: width of a head.
        query_pre_attn_scalar: scores are divided by the square root of this.
        qkv_bias: whether queries, keys and values have biases.
        proj_bias: whether the projection back has one.
    """

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    query_pre_attn_scalar: float
    qkv_bias: bool
    proj_bias: bool

    def window(self, layer: int) -> int | None:
        """Tokens that a query of block ``layer`` (from 0) sees, itself included; None for all."""
        every = self.window_attn_skip_freq
        skipped = every is not None and (layer + 1) % every == 0
        return None if skipped else self.sliding_window

    def flags(self) -> dict[str, Any]:
        """The flags that ask for it, by field of :class:`AttentionFlags`, where all other linear
        layers have no biases."""
        scalar = self.query_pre_attn_scalar
        return {
            **shared(self, _Attention),
            "num_attention_heads": self.num_attention_heads,
            "group_query_attention": self.num_query_groups < self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "query_pre_attn_scalar": None if scalar == self.kv_channels else scalar,
            "add_qkv_bias": self.qkv_bias and not self.proj_bias,
            "add_attention_bias": self.proj_bias,
        }


def resolve_attention(
    flags: AttentionFlags, heads: int, hidden_size: int, bias: bool, resolver: ConfigResolver
) -> AttentionConfig:
    """The attention that flags ask for.

    Args:
        flags: the flags.
        heads: number of query heads.
        hidden_size: width of the residual stream.
        bias: whether all linear layers of the network have biases.
        draft: where the values came from.

    Raises:
        ConfigError: they contradict each other, or do not fit the width.
    """
    if flags.kv_channels is None:
        resolver.check_divides("num_attention_heads", "hidden_size")
    width = resolver.fill(
        "kv_channels", flags.kv_channels, hidden_size // heads, "hidden-size / num-attention-heads"
    )
    groups = flags.num_query_groups
    if groups is None and flags.group_query_attention:
        how = "--group-query-attention without --num-query-groups"
        groups = resolver.put("num_query_groups", 1, how)
    groups = resolver.fill("num_query_groups", groups, heads, "num-attention-heads")
    resolver.check_divides("num_query_groups", "num_attention_heads")
    resolver.put("group_query_attention", groups < heads, "num-query-groups < num-attention-heads")
    resolver.check(
        flags.window_attn_skip_freq is None or flags.sliding_window is not None,
        f"{resolver.show('window_attn_skip_freq')} has an effect with --sliding-window only",
    )
    resolver.check(
        not (flags.add_attention_bias and bias),
        "--add-attention-bias needs --disable-bias-linear: without it all linear layers have "
        "biases",
    )
    resolver.check(
        not (flags.add_attention_bias and flags.add_qkv_bias),
        "--add-attention-bias and --add-qkv-bias contradict each other: with the second the output "
        "projection has no bias; give one of them",
    )
    scalar = flags.query_pre_attn_scalar
    return AttentionConfig(
        **shared(flags, _Attention),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=width,
        query_pre_attn_scalar=float(width) if scalar is None else scalar,
        qkv_bias=bias or flags.add_attention_bias or flags.add_qkv_bias,
        proj_bias=bias or flags.add_attention_bias,
    )
