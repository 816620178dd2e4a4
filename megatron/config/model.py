"""The shape of the network: the flags that describe it, and what they come to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.config.attention import AttentionConfig, AttentionFlags, resolve_attention
from megatron.config.embedding import EmbeddingConfig, Vocabulary
from megatron.config.flags import FRACTION, POSITIVE, Setting, flag_of, names_of, option
from megatron.config.mlp import MLPConfig, MLPFlags, resolve_mlp
from megatron.config.norm import NormConfig
from megatron.config.positions import PositionsConfig, PositionsFlags, resolve_positions
from megatron.config.resolver import ConfigResolver, shared


@dataclass(frozen=True, kw_only=True)
class _Network:
    """What is resolved as it is given and concerns no part alone."""

    family: str = option("gpt", flag="--model-family")
    """What kind of model it is, a file of megatron/families; for tools, since pretrain_gpt.py and
    its like say it themselves."""
    parallel_residual: bool = option(False, role="weights")
    """Compute attention and MLP of a block from the same residual stream, side by side."""
    shared_parallel_norm: bool = option(False, role="weights")
    """Feed both from one norm; needs --parallel-residual."""
    hidden_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability on embeddings and on what each block adds to the residual stream."""
    init_method_std: float = option(0.02, bounds=POSITIVE, megatron=True)
    """Standard deviation of the initial weights; projections back into the residual stream get it
    divided by sqrt(2 x num-layers)."""
    hf_architecture: str | None = option(None, internal=True)
    """Hugging Face's model_type of the model that the weights were first read from."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    num_layers: int | None = option(None, bounds=POSITIVE, role="weights", megatron=True)
    """Number of transformer layers."""
    hidden_size: int | None = option(None, bounds=POSITIVE, role="weights", megatron=True)
    """Width of the residual stream."""
    seq_length: int | None = option(None, bounds=POSITIVE, megatron=True)
    """Tokens of a training sample."""
    add_bias_linear: bool = option(True, off="--disable-bias-linear", role="weights", megatron=True)
    """Leave out the biases of all linear layers."""
    unpadded_vocab_size: int | None = option(None, internal=True, role="weights")
    """Size of the tokenizer's vocabulary."""
    padded_vocab_size: int | None = option(None, internal=True)
    """Rows of the token table."""


# The bases in the reverse order of their flags in --help.
@dataclass(frozen=True, kw_only=True)
class ModelFlags(
    EmbeddingConfig, NormConfig, PositionsFlags, MLPFlags, AttentionFlags, _Network, _Sizes
):
    """Model: the shape of the network."""

    def resolve(self) -> ModelConfig:
        """The network, where no command line is at hand.

        Raises:
            ConfigError: naming flags, values and what would be right.
        """
        given = {
            field.name: Setting(getattr(self, field.name), f"flag {flag_of(field)}")
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return resolve_model(self, ConfigResolver([ModelFlags], given))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Network):
    """The shape of a network.

    Attributes:
        num_layers: number of blocks.
        hidden_size: width of the residual stream.
        seq_length: tokens of a training sample.
        attention: heads, and how they attend.
        mlp: width and activation.
        norm: which norm, and where.
        positions: how positions enter.
        embedding: the first and the last layer.
        vocabulary: sizes of the token embedding.
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig
    positions: PositionsConfig
    embedding: EmbeddingConfig
    vocabulary: Vocabulary = Vocabulary()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that a query of each block sees, itself included; None for all."""
        return tuple(self.attention.window(layer) for layer in range(self.num_layers))

    def with_vocabulary(self, size: int, tensor_size: int = 1) -> ModelConfig:
        """The same network with an embedding of so many tokens, padded so that so many
        tensor-parallel ranks hold equal shares."""
        return dataclasses.replace(self, vocabulary=self.embedding.vocabulary(size, tensor_size))

    def flags(self) -> ModelFlags:
        """The flags that ask for it."""
        values = self.attention.flags() | self.mlp.flags() | self.positions.flags()
        for cls, part in (
            (_Network, self), (NormConfig, self.norm), (EmbeddingConfig, self.embedding),
        ):  # fmt: skip
            values |= shared(part, cls)
        if self.mlp.bias:
            values |= {"add_qkv_bias": False, "add_attention_bias": False}
        return ModelFlags(
            **values,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            seq_length=self.seq_length,
            add_bias_linear=self.mlp.bias,
            unpadded_vocab_size=self.vocabulary.size or None,
            padded_vocab_size=self.vocabulary.padded or None,
        )

    def shaping(self) -> dict[str, Any]:
        """Values that say which parameters there are and what they mean, by flag."""
        flags = self.flags()
        values = {name: getattr(flags, name) for name in names_of("weights", ModelFlags)}
        if self.positions.position_embedding_type == "learned_absolute":
            values["max_position_embeddings"] = self.positions.max_position_embeddings
        return values | {"activation": self.mlp.activation}


def resolve_model(flags: ModelFlags, resolver: ConfigResolver) -> ModelConfig:
    """The network that flags ask for.

    Raises:
        ConfigError: naming flags, values and what would be right.
    """
    layers, hidden, heads, length = resolver.require(
        num_layers=flags.num_layers,
        hidden_size=flags.hidden_size,
        num_attention_heads=flags.num_attention_heads,
        seq_length=flags.seq_length,
    )
    bias = flags.add_bias_linear
    attention = resolve_attention(flags, heads, hidden, bias, resolver)
    mlp = resolve_mlp(flags, hidden, bias, resolver)
    positions = resolve_positions(flags, length, attention.kv_channels, resolver)
    resolver.check(
        flags.rotary_base_local is None or flags.sliding_window is not None,
        f"{resolver.show('rotary_base_local')} has an effect with --sliding-window only",
    )
    resolver.check(
        flags.parallel_residual or not flags.shared_parallel_norm,
        "--shared-parallel-norm needs --parallel-residual: only then do attention and MLP start "
        "from the same hidden states",
    )
    return ModelConfig(
        **shared(flags, _Network),
        num_layers=layers,
        hidden_size=hidden,
        seq_length=length,
        attention=attention,
        mlp=mlp,
        norm=NormConfig(**shared(flags, NormConfig)),
        positions=positions,
        embedding=EmbeddingConfig(**shared(flags, EmbeddingConfig)),
        vocabulary=Vocabulary(flags.unpadded_vocab_size or 0, flags.padded_vocab_size or 0),
    )
