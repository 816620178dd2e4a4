"""Parts of a transformer block: attention, MLP and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config.flags import FRACTION, POSITIVE, ConfigResolver, needs_value, option, shared
from megatron.config.patterns import FREQUENCY, but_every_last, in_pattern, resolved_pattern

_ROPE = needs_value("position_embedding_type", "rope")

GATES = ("swiglu", "geglu", "geglu_erf", "quick_geglu", "squared_reglu")
"""Activations of gated MLPs."""

MLP_ACTIVATIONS = ("gelu_tanh", "gelu_erf", "relu", "squared_relu", "xielu", *GATES)
"""Activations of MLPs, as :class:`MLPConfig` names them."""


class NormTraits(NamedTuple):
    """Properties of a norm that other code depends on.

    Attributes:
        biased: whether it has a bias next to its weight.
        statistics: float32 numbers per position that it keeps for its backward pass.
        weighted: whether it has a weight.
    """

    biased: bool
    statistics: int
    weighted: bool = True


NORMS = {
    "LayerNorm": NormTraits(True, 2),
    "RMSNorm": NormTraits(False, 1),
    "UnbiasedLayerNorm": NormTraits(False, 2),
    "PlainLayerNorm": NormTraits(False, 2, weighted=False),
    "PlainRMSNorm": NormTraits(False, 1, weighted=False),
}
"""The choices of ``--normalization``."""


class Chunk(NamedTuple):
    """Attention within chunks of so many tokens, which are counted from the start of a row."""

    size: int


Window = int | Chunk | None
"""Tokens near a query that a block attends to, as :class:`AttentionFlags` describes windows and
chunks; None for all."""


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """Values that need no resolving."""

    sliding_window: int | None = option(None, bounds=POSITIVE, role="results")
    """Sliding-window attention: number of tokens that a query attends to, itself included; where
    attention is bidirectional, those at most half of it away on either side, as ModernBERT's
    local_attention. Without it a query attends to all tokens before it, or to all."""
    attention_chunk_size: int | None = option(None, bounds=POSITIVE, role="results")
    """Chunked local attention, as Llama 4: a sequence is cut into chunks of this many tokens, and a
    query attends to the tokens of its own chunk up to itself."""
    window_attn_skip_freq: int | str | None = option(None, bounds=FREQUENCY, role="results")
    """Every N-th block uses full attention instead of --sliding-window or --attention-chunk-size;
    or a list with 1 for each block with the window or chunks and 0 for each with full attention, as
    ([1]*3+[0])*4."""
    attn_logit_softcapping: float | None = option(None, bounds=POSITIVE, role="results")
    """Softcap c of the attention scores x: c * tanh(x / c)."""
    softmax_type: str = option(
        "vanilla", choices=("vanilla", "off-by-one", "learnable"), role="weights"
    )
    """Attention sinks: the softmax of the scores has one more score, of no key, so that the weights
    of the keys add up to less than 1. It is 0 with off-by-one, and learned for each head with
    learnable, as in gpt-oss; vanilla has none."""
    attention_output_gate: bool = option(False, role="weights")
    """Multiply the output of attention to a block's own sequence by the sigmoid of a gate for each
    channel, which is projected next to the queries, as Qwen3-Next."""
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
    add_proj_bias: bool = option(False, role="weights")
    """Keep the bias of attention's output projection with --disable-bias-linear, and none of
    queries, keys and values, as GPT-Neo."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(_Attention):
    """Attention of a block; scores are divided by the root of ``query_pre_attn_scalar``."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    query_pre_attn_scalar: float
    qkv_bias: bool
    proj_bias: bool

    @property
    def query_rows(self) -> int:
        """Rows of the projection of the queries, those of their gates included."""
        return self.num_attention_heads * self.kv_channels * (1 + self.attention_output_gate)

    @property
    def local(self) -> str | None:
        """The field of the window or of the chunks; None where all blocks attend to all tokens."""
        if self.attention_chunk_size is not None:
            return "attention_chunk_size"
        return None if self.sliding_window is None else "sliding_window"

    def window(self, layer: int) -> Window:
        """Window or chunks of block ``layer`` (from 0); None for attention to all tokens."""
        every = self.window_attn_skip_freq
        if every is not None and not in_pattern(every, layer, but_every_last):
            return None
        size = self.attention_chunk_size
        return self.sliding_window if size is None else Chunk(size)

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
    """Completes the attention; ``bias``: whether all linear layers have biases; ``width``: channels
    of a head where other flags say them."""
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
    """Gated MLP: swiglu gates with SiLU, geglu with GELU in its tanh approximation, geglu_erf with
    exact GELU, quick_geglu with x * sigmoid(1.702 x), squared_reglu with squared ReLU."""
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
    xielu: bool = option(False, role="weights")
    """xIELU in the MLP instead of GELU, as Apertus: x^2 and expm1(x) - x with a learned factor each
    of every block (arXiv:2411.13010)."""
    add_mlp_bias: bool = option(False, role="weights")
    """Keep the biases of the MLP with --disable-bias-linear, as GPT-J."""
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
    """Norm before attention, MLP and output head. UnbiasedLayerNorm has a weight and no bias, as
    Cohere; PlainLayerNorm and PlainRMSNorm have no parameters, as OLMo 1 and nanochat."""
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
    qk_layernorm_per_head: bool = option(
        False, role="weights", needs=needs_value("qk_layernorm", True)
    )
    """With --qk-layernorm: each head has a weight of its own and no bias, as Cohere."""
    qk_layernorm_after_rope: bool = option(
        False, role="results", needs=needs_value("qk_layernorm", True)
    )
    """With --qk-layernorm: normalise queries and keys after they are rotated, as HunYuan."""
    qk_l2_norm: bool = option(False, role="results", needs=_ROPE)
    """Divide the queries and keys of each head by their root mean square, after they are rotated,
    in the blocks with rotary positions, as Llama 4."""
    embed_layernorm: bool = option(False, role="weights", megatron=True)
    """Apply the norm to the embeddings before the first block."""
    post_norm: bool = option(False, role="weights")
    """Also apply a norm to the outputs of attention and MLP, before the residual addition."""
    sub_norm: bool = option(False, role="weights")
    """Also apply a norm to the inputs of the output projections of attention and MLP, over all
    heads and over the MLP's inner width, as BitNet; needs --normalization RMSNorm."""
    pre_norm: bool = option(True, off="--no-pre-norm", role="weights")
    """Do not apply a norm to the inputs of attention and MLP, as OLMo 2; needs --post-norm."""
    apply_residual_connection_post_layernorm: bool = option(False, role="weights", megatron=True)
    """Add the outputs of attention and MLP to the output of the norm before them instead of its
    input, as in the original BERT: each residual sum is then normalised."""

    @property
    def traits(self) -> NormTraits:
        """Return the properties of the norm in use."""
        return NORMS[self.normalization]
