"""Flags and resolved configuration of a transformer block: attention, MLP and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.flags import FRACTION, POSITIVE, ConfigResolver, needs_value, option, shared
from megatron.config.patterns import FREQUENCY, but_every_last, in_pattern, resolved_pattern

_ROPE = needs_value("position_embedding_type", "rope")

GATES = ("swiglu", "geglu", "geglu_erf", "quick_geglu", "squared_reglu")
"""Activations of gated MLPs."""

MLP_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu", "squared_relu", "xielu", *GATES)
"""Values of :attr:`MLPConfig.activation`."""


class NormTraits(NamedTuple):
    """Properties of a norm that other code depends on.

    Attributes:
        biased: whether the norm has a bias in addition to its weight.
        statistics: number of float32 values per position that are saved for the backward pass.
        weighted: whether the norm has a weight.
    """

    biased: bool
    statistics: int
    weighted: bool = True

    @property
    def centred(self) -> bool:
        """True if the norm subtracts the mean."""
        return self.statistics > 1


NORMS = {
    "LayerNorm": NormTraits(True, 2),
    "RMSNorm": NormTraits(False, 1),
    "UnbiasedLayerNorm": NormTraits(False, 2),
    "PlainLayerNorm": NormTraits(False, 2, weighted=False),
    "PlainRMSNorm": NormTraits(False, 1, weighted=False),
}
"""Properties of each choice of ``--normalization``."""


class Chunk(NamedTuple):
    """Attention within chunks of ``size`` tokens, counted from the start of each sequence."""

    size: int


Window = int | Chunk | None
"""Local attention of a block: the size of a sliding window in tokens, or a :class:`Chunk`. None
means full attention."""


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Fields shared by the flags and the resolved configuration."""

    sliding_window: int | None = option(None, bounds=POSITIVE, role="results")
    """Sliding-window attention: number of tokens that a query attends to, including itself.
    Bidirectional attention reaches at most half of this to either side, as in ModernBERT's
    local_attention. By default attention is not limited to a window."""
    attention_chunk_size: int | None = option(None, bounds=POSITIVE, role="results")
    """Chunked local attention, as in Llama 4: sequences are split into chunks of this many tokens,
    and a query attends only to itself and the preceding tokens of its chunk."""
    window_attn_skip_freq: int | str | None = option(None, bounds=FREQUENCY, role="results")
    """Use full attention instead of --sliding-window or --attention-chunk-size in every N-th block.
    A list such as ([1]*3+[0])*4 chooses the blocks instead: 1 for local, 0 for full attention."""
    attn_logit_softcapping: float | None = option(None, bounds=POSITIVE, role="results")
    """Softcap c of the attention scores x: they become c * tanh(x / c)."""
    softmax_type: str = option(
        "vanilla", choices=("vanilla", "off-by-one", "learnable"), role="weights"
    )
    """Attention sink: an extra score without a key in each softmax, so that the keys' attention
    weights sum to less than 1. The score is 0 with off-by-one, and learned per head with learnable
    (gpt-oss). vanilla has no sink."""
    attention_output_gate: bool = option(False, role="weights")
    """Multiply the output of self-attention by the sigmoid of a gate per channel, which is
    projected together with the queries, as in Qwen3-Next."""
    clip_qkv: float | None = option(None, bounds=POSITIVE, role="results")
    """Clamp queries, keys and values to this absolute value, after QK norm and before RoPE."""
    attention_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability of the attention weights."""
    attention_backend: str = option(
        "sdpa",
        choices=("sdpa", "cudnn", "eager", "flash", "flash2", "flash3", "flash4"),
        spellings={"auto": "sdpa", "fused": "cudnn", "unfused": "eager", "local": "eager"},
    )
    """Attention implementation. sdpa: torch's scaled_dot_product_attention; cudnn: the same, but
    cuDNN's kernel is preferred; eager: plain matrix products; flash2, flash3, flash4: this version
    of the flash-attention package; flash: the fastest installed version that supports the GPU and
    --attention-dropout. On GPUs, all but eager use FlexAttention for documents, sliding windows,
    --attn-logit-softcapping and ALiBi, unless there is dropout. Megatron's auto means sdpa, fused
    means cudnn, unfused and local mean eager."""


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
    """Divide the attention scores by the square root of this."""
    add_qkv_bias: bool = option(False, role="weights", megatron=True)
    """Keep the bias of the query, key and value projections with --disable-bias-linear."""
    add_attention_bias: bool = option(False, role="weights")
    """Keep the biases of all attention projections, output included, with --disable-bias-linear."""
    add_proj_bias: bool = option(False, role="weights")
    """Keep the bias of attention's output projection with --disable-bias-linear, but not the biases
    of queries, keys and values, as in GPT-Neo."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(_Attention):
    """Resolved attention. Scores are divided by the square root of ``query_pre_attn_scalar``."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    query_pre_attn_scalar: float
    qkv_bias: bool
    proj_bias: bool

    @property
    def query_rows(self) -> int:
        """Output size of the query projection, including the output gates."""
        return self.num_attention_heads * self.kv_channels * (1 + self.attention_output_gate)

    @property
    def local(self) -> str | None:
        """Name of the field that selects local attention; None if all blocks use full attention."""
        if self.attention_chunk_size is not None:
            return "attention_chunk_size"
        return None if self.sliding_window is None else "sliding_window"

    def window(self, layer: int) -> Window:
        """Return the window or chunk of block ``layer`` (from 0), or None for full attention."""
        every = self.window_attn_skip_freq
        if every is not None and not in_pattern(every, layer, but_every_last):
            return None
        size = self.attention_chunk_size
        return self.sliding_window if size is None else Chunk(size)

    def flags(self) -> dict[str, Any]:
        """Return the flags that resolve to this attention with --disable-bias-linear, by field."""
        scalar = self.query_pre_attn_scalar
        return {
            **shared(self, _Attention),
            "num_attention_heads": self.num_attention_heads,
            "group_query_attention": self.num_query_groups < self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "query_pre_attn_scalar": None if scalar == self.kv_channels else scalar,
            "add_qkv_bias": self.qkv_bias and not self.proj_bias,
            "add_attention_bias": self.proj_bias and self.qkv_bias,
            "add_proj_bias": self.proj_bias and not self.qkv_bias,
        }


def resolve_attention(
    flags: AttentionFlags,
    layers: int,
    heads: int,
    hidden_size: int,
    bias: bool,
    resolver: ConfigResolver,
    width: int | None = None,
) -> AttentionConfig:
    """Resolve the attention flags. ``bias`` tells whether all linear layers have biases, ``width``
    is the head size if other flags determine it. Raises ConfigError on contradictions."""
    if width is not None:
        if flags.kv_channels not in (None, width):
            resolver.notes.append(
                f"{resolver.show('kv_channels')} changes nothing: the flags of a head's parts add "
                f"up to {width}"
            )
        resolver.put("kv_channels", width, "the parts of a head")
    else:
        if flags.kv_channels is None:
            resolver.check_divides("num_attention_heads", "hidden_size")
        how = "hidden-size / num-attention-heads"
        width = resolver.fill("kv_channels", flags.kv_channels, hidden_size // heads, how)
    groups = flags.num_query_groups
    if groups is None and flags.group_query_attention:
        how = "--group-query-attention without --num-query-groups"
        groups = resolver.put("num_query_groups", 1, how)
    groups = resolver.fill("num_query_groups", groups, heads, "num-attention-heads")
    resolver.check_divides("num_query_groups", "num_attention_heads")
    resolver.put("group_query_attention", groups < heads, "num-query-groups < num-attention-heads")
    resolver.check(
        flags.sliding_window is None or flags.attention_chunk_size is None,
        f"{resolver.show('sliding_window')} contradicts {resolver.show('attention_chunk_size')}: a "
        "block attends to a window or within a chunk; give one of them",
    )
    every = flags.window_attn_skip_freq
    if flags.sliding_window is None and flags.attention_chunk_size is None:
        needed = "--sliding-window or --attention-chunk-size"
        resolver.check_unused("window_attn_skip_freq", needed)
    elif every is not None:
        every = resolved_pattern("window_attn_skip_freq", every, layers, but_every_last, resolver)
    for name in ("add_attention_bias", "add_proj_bias"):
        resolver.check(
            not (getattr(flags, name) and bias),
            f"{resolver.flag(name)} needs --disable-bias-linear: without it all linear layers have "
            "biases",
        )
    resolver.check(
        not (flags.add_attention_bias and flags.add_qkv_bias),
        "--add-attention-bias and --add-qkv-bias contradict each other: with the second the output "
        "projection has no bias; give one of them",
    )
    resolver.check(
        not (flags.add_proj_bias and (flags.add_attention_bias or flags.add_qkv_bias)),
        "--add-proj-bias is for a bias of the output projection alone; give --add-attention-bias "
        "for biases of all of attention's projections",
    )
    scalar = flags.query_pre_attn_scalar
    return AttentionConfig(
        **shared(flags, _Attention) | {"window_attn_skip_freq": every},
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=width,
        query_pre_attn_scalar=float(width) if scalar is None else scalar,
        qkv_bias=bias or flags.add_attention_bias or flags.add_qkv_bias,
        proj_bias=bias or flags.add_attention_bias or flags.add_proj_bias,
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
    """Activation of a gated MLP's gate: swiglu uses SiLU, geglu the tanh approximation of GELU,
    geglu_erf exact GELU, quick_geglu x * sigmoid(1.702 x), squared_reglu squared ReLU."""
    swiglu: bool = option(False, megatron=True)
    """Same as --glu-activation swiglu."""
    quick_geglu: bool = option(False, megatron=True)
    """Same as --glu-activation quick_geglu."""
    glu_linear_offset: float = option(0.0, role="results", megatron=True)
    """Gated MLP: constant added to the up projection before it is gated (1.0 in gpt-oss)."""
    activation_func_clamp_value: float | None = option(
        None, bounds=POSITIVE, role="results", megatron=True
    )
    """Gated MLP: upper bound on the gate's input, and bound on the up projection's absolute value
    before --glu-linear-offset is added (7.0 in gpt-oss)."""
    relu: bool = option(False, role="results")
    """Use ReLU in the MLP instead of GELU."""
    squared_relu: bool = option(False, role="results", megatron=True)
    """Use squared ReLU in the MLP instead of GELU."""
    xielu: bool = option(False, role="weights")
    """Use xIELU in the MLP instead of GELU, as in Apertus: combines x^2 and expm1(x) - x, each with
    a factor that is learned per block (arXiv:2411.13010)."""
    add_mlp_bias: bool = option(False, role="weights")
    """Keep the biases of the MLP with --disable-bias-linear, as in GPT-J."""
    openai_gelu: bool = option(False, megatron=True)
    """Use the tanh approximation of GELU. MLPs already do so by default; with this flag BERT's
    output head does too, where the default is exact GELU."""
    bias_gelu_fusion: bool = option(True, off="--no-bias-gelu-fusion", megatron=True)
    """Use exact GELU (erf) instead of its tanh approximation, as Megatron's unfused path does."""


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """Resolved MLP of a block. ``activation`` is one of :data:`MLP_ACTIVATIONS`. A gated MLP
    computes activation(min(gate, c)) * (clamp(up, -c, c) + o) where c is
    ``activation_func_clamp_value`` and o is ``glu_linear_offset``."""

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
        """Return the flags that resolve to this MLP, by field."""
        return {
            "ffn_hidden_size": self.ffn_hidden_size,
            "glu_activation": self.activation if self.gated else None,
            "swiglu": self.activation == "swiglu",
            "quick_geglu": self.activation == "quick_geglu",
            "glu_linear_offset": self.glu_linear_offset,
            "activation_func_clamp_value": self.activation_func_clamp_value,
            "relu": self.activation == "relu",
            "squared_relu": self.activation == "squared_relu",
            "xielu": self.activation == "xielu",
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
    resolver.check(
        not (flags.add_mlp_bias and bias),
        "--add-mlp-bias needs --disable-bias-linear: without it all linear layers have biases",
    )
    return MLPConfig(
        ffn_hidden_size=width,
        activation=activation,
        bias=bias or flags.add_mlp_bias,
        openai_gelu=flags.openai_gelu,
        glu_linear_offset=flags.glu_linear_offset,
        activation_func_clamp_value=flags.activation_func_clamp_value,
    )


_GATE_FLAGS = {"swiglu": "--swiglu", "quick_geglu": "--quick-geglu"}
"""Flags that each select one gate activation."""


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
        "--xielu": "xielu" if flags.xielu else None,
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
    """Norm before attention, MLP and output head. UnbiasedLayerNorm (Cohere) has a weight but no
    bias; PlainLayerNorm (OLMo 1) and PlainRMSNorm (nanochat) have no parameters."""
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
    """Multiply by 1 + weight in the norms, with weights that start at 0."""
    qk_layernorm: bool = option(False, role="weights", megatron=True)
    """Apply the norm to the queries and keys of each head."""
    qk_layernorm_whole: bool = option(
        False, role="weights", needs=needs_value("qk_layernorm", True)
    )
    """With --qk-layernorm: normalise across all query heads at once, and likewise across all key
    heads, as in OLMo 2 and OLMoE. Requires --normalization RMSNorm."""
    qk_layernorm_per_head: bool = option(
        False, role="weights", needs=needs_value("qk_layernorm", True)
    )
    """With --qk-layernorm: give each head a weight of its own and no bias, as in Cohere."""
    qk_layernorm_after_rope: bool = option(
        False, role="results", needs=needs_value("qk_layernorm", True)
    )
    """With --qk-layernorm: normalise queries and keys after the rotary embedding, as in HunYuan."""
    qk_l2_norm: bool = option(False, role="results", needs=_ROPE)
    """Divide the queries and keys of each head by their root mean square after the rotary
    embedding. Blocks without rotary positions are not affected, as in Llama 4."""
    embed_layernorm: bool = option(False, role="weights", megatron=True)
    """Apply the norm to the embeddings before the first block."""
    post_norm: bool = option(False, role="weights")
    """Also apply a norm to the outputs of attention and MLP, before the residual addition."""
    sub_norm: bool = option(False, role="weights")
    """Also apply a norm to the inputs of the output projections, over all heads in attention and
    over the inner width in the MLP, as in BitNet. Requires --normalization RMSNorm."""
    pre_norm: bool = option(True, off="--no-pre-norm", role="weights")
    """Apply no norm to the inputs of attention and MLP, as in OLMo 2. Requires --post-norm."""
    apply_residual_connection_post_layernorm: bool = option(False, role="weights", megatron=True)
    """Add the outputs of attention and MLP to the normalised input instead of the input itself, as
    in the original BERT, where the norm follows each residual sum."""

    @property
    def traits(self) -> NormTraits:
        """Properties of the norm in use."""
        return NORMS[self.normalization]
