"""The shape of the network."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


@dataclass(frozen=True)
class ModelConfig:
    """Model: the shape of the network."""

    family: str = option("gpt", flag="--model-family")
    """What kind of model it is, a file of megatron/families; for tools, since pretrain_gpt.py and
    its like say it themselves."""
    num_layers: int | None = option(None)
    """Number of transformer layers."""
    hidden_size: int | None = option(None)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = option(
        None, derived="4 x hidden-size; with a gate 8/3 x hidden-size, down to a multiple of 64"
    )
    """Inner width of the MLP."""
    num_attention_heads: int | None = option(None)
    """Number of query heads."""
    group_query_attention: bool = option(False)
    """Share key and value heads among groups of query heads."""
    num_query_groups: int | None = option(
        None,
        aliases=("--num-key-value-heads",),
        derived="num-attention-heads; 1 with --group-query-attention",
    )
    """Number of key and value heads."""
    kv_channels: int | None = option(None, derived="hidden-size / num-attention-heads")
    """Width of one head."""
    seq_length: int | None = option(None)
    """Tokens of a training sample."""
    max_position_embeddings: int | None = option(None, derived="seq-length")
    """Rows of the learned position table; the longest sequence the model can take."""
    position_embedding_type: str = option(
        "learned_absolute", choices=("learned_absolute", "rope", "alibi", "none")
    )
    """How positions enter the model: a learned table, rotated queries and keys, attention biases
    that grow with the distance, or only by the causal order."""
    position_embedding_offset: int = option(0)
    """Row of the learned table that holds position 0 (2 in OPT)."""
    use_rotary_position_embeddings: bool = option(False)
    """Older spelling of --position-embedding-type rope."""
    rotary_base: float = option(10000.0)
    """Base of the rotary frequencies."""
    rotary_percent: float = option(1.0)
    """Share of each head's width that is rotated."""
    rotary_base_local: float | None = option(None)
    """Base of the rotary frequencies, unscaled, in blocks with a sliding window, where it is
    another there (Gemma 3)."""
    rope_scaling: str | None = option(None)
    """How rotary frequencies are stretched beyond the trained length, as JSON in the form of
    Hugging Face's config.json: rope_type linear, llama3, yarn or longrope, and its numbers."""
    use_rope_scaling: bool = option(False)
    """Stretch the rotary frequencies as Llama 3.1 does."""
    rope_scaling_factor: float = option(8.0)
    """Factor of --use-rope-scaling."""
    sliding_window: int | None = option(None)
    """Tokens that a query sees, itself included; all before it without this."""
    window_attn_skip_freq: int | None = option(None)
    """Every so-manieth block sees all tokens, in spite of --sliding-window."""
    query_pre_attn_scalar: float | None = option(None, derived="kv-channels")
    """Attention scores are divided by the square root of this."""
    attn_logit_softcapping: float | None = option(None)
    """Bend attention scores x to c * tanh(x / c), with this c."""
    final_logit_softcapping: float | None = option(None)
    """Bend the logits in the same way."""
    qk_layernorm: bool = option(False)
    """Normalise each head's queries and keys."""
    normalization: str = option(
        "LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        spellings={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    """Normalisation in front of attention, MLP and head."""
    norm_epsilon: float = option(1e-5, aliases=("--layernorm-epsilon",))
    """Added to the variance in the norms."""
    apply_layernorm_1p: bool = option(False)
    """Norms multiply by 1 + weight, and the weight starts at 0."""
    embed_layernorm: bool = option(False)
    """Normalise the embeddings before the first block."""
    scale_embeddings: bool = option(False)
    """Multiply the embeddings by the square root of hidden-size."""
    post_norm: bool = option(False)
    """Normalise also what attention and MLP give, before it is added to the residual stream."""
    parallel_residual: bool = option(False)
    """Compute attention and MLP of a block from the same residual stream, side by side."""
    shared_parallel_norm: bool = option(False)
    """Feed both from one norm; needs --parallel-residual."""
    glu_activation: str | None = option(None, choices=("swiglu", "geglu"))
    """Gated MLP with SiLU or with GELU by the tanh approximation."""
    swiglu: bool = option(False)
    """Same as --glu-activation swiglu."""
    relu: bool = option(False)
    """ReLU in the MLP instead of GELU."""
    squared_relu: bool = option(False)
    """Squared ReLU in the MLP instead of GELU."""
    openai_gelu: bool = option(False)
    """GELU by the tanh approximation (the default already)."""
    bias_gelu_fusion: bool = option(True, off="--no-bias-gelu-fusion")
    """GELU by the exact error function instead of the tanh approximation."""
    add_bias_linear: bool = option(True, off="--disable-bias-linear")
    """Leave out the biases of all linear layers."""
    add_qkv_bias: bool = option(False)
    """Keep a bias on query, key and value even with --disable-bias-linear."""
    add_attention_bias: bool = option(False)
    """Keep the biases of attention, on query, key, value and output, with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = option(False)
    """Give the output head weights of its own instead of the token embedding's."""
    attention_dropout: float = option(0.1)
    """Dropout probability on attention weights."""
    hidden_dropout: float = option(0.1)
    """Dropout probability on embeddings and on what each block adds to the residual stream."""
    init_method_std: float = option(0.02)
    """Standard deviation of the initial weights; projections back into the residual stream get it
    divided by sqrt(2 x num-layers)."""
    make_vocab_size_divisible_by: int = option(128)
    """The token table is padded to a multiple of this times the tensor-parallel size."""
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
    unpadded_vocab_size: int | None = option(None, internal=True)
    """Size of the tokenizer's vocabulary."""
    padded_vocab_size: int | None = option(None, internal=True)
    """Rows of the token table."""
    hf_architecture: str | None = option(None, internal=True)
    """Hugging Face's model_type of the model that the weights were first read from."""

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.attention_bias or self.add_qkv_bias

    @property
    def attention_bias(self) -> bool:
        """Whether all linear layers of attention have biases."""
        return self.add_bias_linear or self.add_attention_bias

    @property
    def activation(self) -> str:
        """One of ``swiglu``, ``geglu``, ``relu``, ``squared_relu``, ``gelu_tanh``, ``gelu_erf``."""
        if self.gated:
            return self.glu_activation or "swiglu"
        if self.relu:
            return "relu"
        if self.squared_relu:
            return "squared_relu"
        return "gelu_tanh" if self.bias_gelu_fusion or self.openai_gelu else "gelu_erf"

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with what goes up."""
        return self.swiglu or self.glu_activation is not None

    def window(self, layer: int) -> int | None:
        """Tokens that a query of block ``layer`` (from 0) sees, itself included; None for all."""
        every = self.window_attn_skip_freq
        skipped = every is not None and (layer + 1) % every == 0
        return None if skipped else self.sliding_window

    @property
    def windows(self) -> tuple[int | None, ...]:
        """:meth:`window` of every block."""
        return tuple(self.window(layer) for layer in range(self.num_layers or 0))

    @property
    def tied(self) -> bool:
        """Whether the head uses the token embedding's weights."""
        return not self.untie_embeddings_and_output_weights
