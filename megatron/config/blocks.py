"""Parts of a transformer block: attention, MLP and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.flags import (
    FRACTION,
    POSITIVE,
    ConfigResolver,
    needs_value,
    option,
    shared,
)

GATES = ("swiglu", "geglu", "quick_geglu")
"""Activations of gated MLPs."""

MLP_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu", "squared_relu", *GATES)
"""Activations of MLPs, as :class:`MLPConfig` names them."""


class NormTraits(NamedTuple):
    """Properties of a norm that other code depends on.

    Attributes:
        biased: whether it has a bias next to its weight.
        statistics: float32 numbers per position that it keeps for its backward pass.
    """

    biased: bool
    statistics: int


NORMS = {"LayerNorm": NormTraits(True, 2), "RMSNorm": NormTraits(False, 1)}
"""The choices of ``--normalization``."""


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Values that need no resolving."""

    sliding_window: int | None = option(None, bounds=POSITIVE, role="results")
    """Sliding-window attention: number of tokens that a query attends to, itself included; where
    attention is bidirectional, those at most half of it away on either side, as ModernBERT's
    local_attention. Without it a query attends to all tokens before it, or to all."""
    window_attn_skip_freq: int | None = option(None, bounds=POSITIVE, role="results")
    """Every N-th block uses full attention instead of --sliding-window."""
    attn_logit_softcapping: float | None = option(None, bounds=POSITIVE, role="results")
    """Softcap c of the attention scores x: c * tanh(x / c)."""
    softmax_type: str = option(
        "vanilla", choices=("vanilla", "off-by-one", "learnable"), role="weights"
    )
    """Attention sinks: the softmax of the scores has one more score, of no key, so that the weights
    of the keys add up to less than 1. It is 0 with off-by-one, and learned for each head with
    learnable, as in gpt-oss; vanilla has none."""
    clip_qkv: float | None = option(None, bounds=POSITIVE, role="results")
    """Clamp queries, keys and values to this absolute value, after their norm and before rotary
    positions."""
    attention_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability of the attention weights."""
    attention_backend: str = option(
        "sdpa",
        choices=("sdpa", "cudnn", "eager", "flash", "flash2", "flash3", "flash4"),
        spellings={"auto": "sdpa", "fused": "cudnn", "unfused": "eager", "local": "eager"},
    )
    """Attention kernel: sdpa is torch's scaled_dot_product_attention, cudnn the same with cuDNN's
    kernel preferred, eager plain matrix products, flash2, flash3 and flash4 these versions of
    flash-attention from their packages, and flash the fastest of them that is installed and
    supports the GPU and --attention-dropout. On GPUs documents, sliding windows,
    --attn-logit-softcapping and ALiBi use FlexAttention with all but eager, unless there is
    dropout. Megatron's auto is sdpa, fused is cudnn, unfused and local are eager."""


@dataclass(frozen=True, kw_only=True)
class AttentionFlags(_Attention):
    """Attention."""

    num_attention_heads: int | None = option(None, bounds=POSITIVE, role="weights", megatron=True)
    """Number of attention (query) heads."""
    group_query_attention: bool = option(False)
    """Use grouped-query attention; see --num-query-groups."""
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
    """Size of one attention head."""
    query_pre_attn_scalar: float | None = option(
        None, derived="kv-channels", bounds=POSITIVE, role="results"
    )
    """Attention scores are divided by the square root of this."""
    add_qkv_bias: bool = option(False, role="weights", megatron=True)
    """Keep the bias of the query, key and value projections with --disable-bias-linear."""
    add_attention_bias: bool = option(False, role="weights")
    """Keep the biases of all attention projections, output included, with --disable-bias-linear."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(_Attention):
    """Attention of a block; scores are divided by the root of ``query_pre_attn_scalar``."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    query_pre_attn_scalar: float
    qkv_bias: bool
    proj_bias: bool

    def window(self, layer: int) -> int | None:
        """``sliding_window`` of block ``layer`` (from 0); None for attention to all tokens."""
        every = self.window_attn_skip_freq
        skipped = every is not None and (layer + 1) % every == 0
        return None if skipped else self.sliding_window

    def flags(self) -> dict[str, Any]:
        """The flags that give it, by field, where all other linear layers have no biases."""
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
    """Completes the attention; ``bias``: whether all linear layers have biases."""
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
    if flags.sliding_window is None:
        resolver.check_unused("window_attn_skip_freq", "--sliding-window")
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


@dataclass(frozen=True, kw_only=True)
class MLPFlags:
    """MLP."""

    ffn_hidden_size: int | None = option(
        None,
        aliases=("--intermediate-size",),
        derived="4 x hidden-size; for gated MLPs 8/3 x hidden-size, rounded down to a multiple "
        "of 64",
        bounds=POSITIVE,
        role="weights",
        megatron=True,
    )
    """Inner size of the MLP."""
    glu_activation: str | None = option(None, choices=GATES, role="results")
    """Gated MLP: swiglu gates with SiLU, geglu with GELU in its tanh approximation, quick_geglu
    with x * sigmoid(1.702 x)."""
    swiglu: bool = option(False, megatron=True)
    """Same as --glu-activation swiglu."""
    quick_geglu: bool = option(False, megatron=True)
    """Same as --glu-activation quick_geglu."""
    glu_linear_offset: float = option(0.0, role="results", megatron=True)
    """Gated MLP: added to the up projection before the gate multiplies it (1.0 in gpt-oss)."""
    activation_func_clamp_value: float | None = option(
        None, bounds=POSITIVE, role="results", megatron=True
    )
    """Gated MLP: the largest input of the gate, and the largest absolute value of the up projection
    before --glu-linear-offset (7.0 in gpt-oss)."""
    relu: bool = option(False, role="results")
    """ReLU in the MLP instead of GELU."""
    squared_relu: bool = option(False, role="results", megatron=True)
    """Squared ReLU in the MLP instead of GELU."""
    openai_gelu: bool = option(False, megatron=True)
    """GELU in its tanh approximation, which is already the default in MLPs; in BERT's output head
    too, where the default is exact."""
    bias_gelu_fusion: bool = option(True, off="--no-bias-gelu-fusion", megatron=True)
    """Exact GELU (erf) instead of its tanh approximation, as in Megatron's unfused path."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The MLP of a block: ``activation`` is one of :data:`MLP_ACTIVATIONS`. Of gated ones c is
    ``activation_func_clamp_value`` and o ``glu_linear_offset``: the gate's activation of
    min(gate, c), times min(max(up, -c), c) + o."""

    ffn_hidden_size: int
    activation: str
    bias: bool
    openai_gelu: bool = False
    glu_linear_offset: float = 0.0
    activation_func_clamp_value: float | None = None

    @property
    def gated(self) -> bool:
        return self.activation in GATES

    def flags(self) -> dict[str, Any]:
        """The flags that give it, by field."""
        return {
            "ffn_hidden_size": self.ffn_hidden_size,
            "glu_activation": self.activation if self.gated else None,
            "swiglu": self.activation == "swiglu",
            "quick_geglu": self.activation == "quick_geglu",
            "glu_linear_offset": self.glu_linear_offset,
            "activation_func_clamp_value": self.activation_func_clamp_value,
            "relu": self.activation == "relu",
            "squared_relu": self.activation == "squared_relu",
            "openai_gelu": self.openai_gelu,
            "bias_gelu_fusion": self.activation != "gelu_erf",
        }


def resolve_mlp(
    flags: MLPFlags, hidden_size: int, bias: bool, resolver: ConfigResolver
) -> MLPConfig:
    activation = _activation(flags, resolver)
    assert activation in MLP_ACTIVATIONS, activation
    width, how = 4 * hidden_size, "4 x hidden-size"
    if activation in GATES:
        width = int(hidden_size * 8 / 3) // 64 * 64 or hidden_size
        how = "8/3 x hidden-size, rounded down to a multiple of 64"
    width = resolver.fill("ffn_hidden_size", flags.ffn_hidden_size, width, how)
    if activation not in GATES:
        gate = " or ".join(("--glu-activation", *_GATE_FLAGS.values()))
        resolver.check_unused("activation_func_clamp_value", gate)
        resolver.check(
            not flags.glu_linear_offset, f"{resolver.show('glu_linear_offset')} needs {gate}"
        )
    return MLPConfig(
        ffn_hidden_size=width,
        activation=activation,
        bias=bias,
        openai_gelu=flags.openai_gelu,
        glu_linear_offset=flags.glu_linear_offset,
        activation_func_clamp_value=flags.activation_func_clamp_value,
    )


_GATE_FLAGS = {"swiglu": "--swiglu", "quick_geglu": "--quick-geglu"}
"""The flags that name one gate each."""


def _activation(flags: MLPFlags, resolver: ConfigResolver) -> str:
    gate = flags.glu_activation
    for name, flag in _GATE_FLAGS.items():
        if getattr(flags, name):
            resolver.check(
                gate in (None, name),
                f"{flag} contradicts {resolver.show('glu_activation')}; give one of them",
            )
            gate = resolver.fill("glu_activation", gate, name, flag)
        elif gate == name:
            resolver.put(name, True, f"--glu-activation {name}")
    requested = {
        _GATE_FLAGS.get(gate or "", f"--glu-activation {gate}"): gate,
        "--relu": "relu" if flags.relu else None,
        "--squared-relu": "squared_relu" if flags.squared_relu else None,
    }
    given = {flag: activation for flag, activation in requested.items() if activation is not None}
    resolver.check(
        len(given) < 2, f"{' contradicts '.join(given)}: an MLP has one activation; give one"
    )
    if given and flags.openai_gelu:
        resolver.notes.append(f"--openai-gelu changes nothing in an MLP with {next(iter(given))}")
    gelu = "gelu_tanh" if flags.bias_gelu_fusion or flags.openai_gelu else "gelu_erf"
    return next(iter(given.values()), gelu)


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Norms: type and position."""

    normalization: str = option(
        "LayerNorm",
        choices=tuple(NORMS),
        spellings={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
        role="weights",
        megatron=True,
    )
    """Norm before attention, MLP and output head."""
    norm_epsilon: float = option(
        1e-5,
        aliases=("--layernorm-epsilon",),
        bounds=POSITIVE,
        megatron=("layernorm_epsilon", "norm_epsilon"),
    )
    """Epsilon added to the variance in the norms."""
    apply_layernorm_1p: bool = option(
        False, role="weights", megatron=("apply_layernorm_1p", "layernorm_zero_centered_gamma")
    )
    """Norms multiply by 1 + weight; the weights start at 0."""
    qk_layernorm: bool = option(False, role="weights", megatron=True)
    """Apply the norm to the queries and keys of each head."""
    qk_layernorm_whole: bool = option(
        False, role="weights", needs=needs_value("qk_layernorm", True)
    )
    """With --qk-layernorm: normalise the queries of all heads together, and the keys of all heads,
    as OLMo 2 and OLMoE; needs --normalization RMSNorm."""
    qk_layernorm_after_rope: bool = option(
        False, role="results", needs=needs_value("qk_layernorm", True)
    )
    """With --qk-layernorm: normalise queries and keys after they are rotated, as HunYuan."""
    embed_layernorm: bool = option(False, role="weights", megatron=True)
    """Apply the norm to the embeddings before the first block."""
    post_norm: bool = option(False, role="weights")
    """Also apply a norm to the outputs of attention and MLP, before the residual addition."""
    pre_norm: bool = option(True, off="--no-pre-norm", role="weights")
    """Do not apply a norm to the inputs of attention and MLP, as OLMo 2; needs --post-norm."""
    apply_residual_connection_post_layernorm: bool = option(False, role="weights", megatron=True)
    """Add the outputs of attention and MLP to the output of the norm before them instead of its
    input, as in the original BERT: each residual sum is then normalised."""

    @property
    def traits(self) -> NormTraits:
        """Return the properties of the norm in use."""
        return NORMS[self.normalization]
