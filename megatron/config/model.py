"""Flags that describe a network, and the model configuration that they resolve to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron.config.blocks import (
    GATES,
    MLP_ACTIVATIONS,
    AttentionConfig,
    AttentionFlags,
    MLPConfig,
    MLPFlags,
    NormConfig,
    Window,
    resolve_attention,
    resolve_mlp,
)
from megatron.config.contradictions import refuse_contradictions
from megatron.config.features import ModelPart, model_parts
from megatron.config.flags import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    ConfigError,
    ConfigResolver,
    Need,
    Setting,
    flag_of,
    names_of,
    option,
    shared,
)
from megatron.config.patterns import MOST_LAYERS
from megatron.config.positions import PositionsConfig, PositionsFlags, resolve_positions

Part = TypeVar("Part", bound=ModelPart)

HEADS = ("lm", "classification", "multiple_choice", "span", "reward")
"""Kinds of output head."""
LAYERS = Bounds(lambda value: 0 < value <= MOST_LAYERS, "must be from 1 to 16,384")
"""Bounds of the number of layers: another program's configuration may contain a huge number."""


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary sizes: ``size`` is the number of tokens (0 without a tokenizer), ``padded`` the
    number of rows of the token embedding, which tensor-parallel ranks share equally."""

    size: int = 0
    padded: int = 0


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """Embedding and head."""

    untie_embeddings_and_output_weights: bool = option(False, role="weights", megatron=True)
    """Give the output head its own weights instead of those of the token embedding."""
    lm_head_bias: bool = option(False, role="weights")
    """Add a learned bias to the logits, as in Phi-3.5-MoE. The head of a BERT has its own flags."""
    scale_embeddings: bool = option(False, role="results")
    """Multiply the token embeddings by the square root of --hidden-size."""
    embedding_multiplier: float | None = option(None, bounds=POSITIVE, role="results")
    """Multiply the token embeddings by this, as in Granite."""
    logits_scaling: float | None = option(None, bounds=POSITIVE, role="results")
    """Divide the logits by this, as in Granite."""
    scale_head_input: bool = option(False, role="results")
    """Divide the input of the output head by the square root of --hidden-size, as T5 does if the
    head shares the token embedding's weights."""
    final_logit_softcapping: float | None = option(None, bounds=POSITIVE, role="results")
    """Softcap c of the logits x: they become c * tanh(x / c)."""
    make_vocab_size_divisible_by: int = option(128, bounds=POSITIVE, megatron=True)
    """Pad the rows of the token embedding to a multiple of this times the tensor-parallel size."""

    @property
    def tied(self) -> bool:
        """True if the head shares the token embedding's weights."""
        return not self.untie_embeddings_and_output_weights

    def vocabulary(self, size: int, tensor_size: int = 1) -> Vocabulary:
        """Return the vocabulary for ``size`` tokens on ``tensor_size`` tensor-parallel ranks."""
        multiple = self.make_vocab_size_divisible_by * tensor_size
        return Vocabulary(size, -(-size // multiple) * multiple)


_HALF = Need("--fp16 or --bf16", lambda values: values["fp16"] or values["bf16"])


@dataclass(frozen=True, kw_only=True)
class _Network:
    """Fields shared by the flags and the resolved configuration."""

    family: str = option("gpt", flag="--model-family")
    """Model family, the name of a file in megatron/families. Only tools need this flag:
    pretrain_gpt.py always uses gpt."""
    parallel_residual: bool = option(False, role="weights")
    """Compute a block's attention and MLP in parallel, from the same hidden states."""
    residual_multiplier: float | None = option(None, bounds=POSITIVE, role="results")
    """Multiply the outputs of attention and MLP by this before the residual addition (Granite)."""
    shared_parallel_norm: bool = option(False, role="weights")
    """Share one norm between attention and MLP. Requires --parallel-residual."""
    bert_binary_head: bool = option(
        True, off="--bert-no-binary-head", role="weights", megatron=True
    )
    """BERT: leave out the pooler, the second head (which predicts whether two segments belong
    together) and token types. Each sample then has one segment."""
    num_tokentypes: int | None = option(None, bounds=NOT_NEGATIVE, role="weights")
    """BERT: number of rows of the token type embedding; 0 for no such embedding. The default is 2
    with the second head, else 0."""
    lm_head_activation: str | None = option(
        None,
        choices=tuple(name for name in MLP_ACTIVATIONS if name not in (*GATES, "xielu")),
        derived="gelu_erf; gelu_tanh with --openai-gelu",
        role="results",
    )
    """BERT: activation of the masked-LM head. Hugging Face uses one activation for head and MLP."""
    hidden_dropout: float = option(0.1, bounds=FRACTION, megatron=True)
    """Dropout probability of the embeddings and of the outputs of attention and MLP."""
    init_method_std: float = option(0.02, bounds=POSITIVE, megatron=True)
    """Standard deviation of the initial weights. For the output projections of attention and MLP it
    is divided by sqrt(2 x num-layers)."""
    init_method_xavier_uniform: bool = option(False, megatron=True)
    """Initialise all weights from the Xavier uniform distribution instead of with
    --init-method-std. Its bound is sqrt(6 / (rows + columns)) of the unsharded matrix."""
    fp32_residual_connection: bool = option(False, role="results", megatron=True, needs=_HALF)
    """Keep the residual stream, from the embeddings to the last norm, in float32."""
    encoder_decoder: bool = option(False, internal=True)
    """True if a decoder follows the encoder and attends to its output."""
    hf_architecture: str | None = option(None, internal=True)
    """Model type (model_type in Hugging Face's config.json) of the original weights."""
    head: str = option("lm", choices=HEADS, internal=True, role="weights")
    """Output head, named after what it scores: tokens (lm), labels of a text (classification), each
    of several choices, the first and last token of a span, or a whole text (reward)."""
    num_labels: int | None = option(None, bounds=POSITIVE, internal=True, role="weights")
    """Number of labels of a classification head; 1 for regression."""
    label_names: tuple[str, ...] = option((), internal=True)
    """Names of the labels, or empty if they have none."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    num_layers: int | None = option(None, bounds=LAYERS, role="weights", megatron=True)
    """Number of transformer layers. In an encoder-decoder model, of the encoder."""
    encoder_num_layers: int | None = option(None, derived="num-layers", bounds=LAYERS)
    """Same as --num-layers."""
    decoder_num_layers: int | None = option(
        None, derived="num-layers", bounds=LAYERS, role="weights", megatron=True
    )
    """Number of transformer layers of the decoder in an encoder-decoder model (T5)."""
    hidden_size: int | None = option(None, bounds=POSITIVE, role="weights", megatron=True)
    """Size of the hidden states."""
    seq_length: int | None = option(None, bounds=POSITIVE, megatron=True)
    """Sequence length in tokens. In an encoder-decoder model, of the encoder."""
    encoder_seq_length: int | None = option(None, derived="seq-length", bounds=POSITIVE)
    """Same as --seq-length."""
    decoder_seq_length: int | None = option(
        None,
        derived="the most that an encoder input can need, rounded up to a multiple of 64",
        bounds=POSITIVE,
        megatron=True,
    )
    """Sequence length of the decoder and its labels, in tokens, if there is a decoder (T5)."""
    add_bias_linear: bool = option(True, off="--disable-bias-linear", role="weights", megatron=True)
    """Do not use biases in linear layers."""
    unpadded_vocab_size: int | None = option(None, internal=True, role="weights")
    """Number of tokens in the tokenizer's vocabulary."""
    padded_vocab_size: int | None = option(None, internal=True)
    """Number of rows of the token embedding, including padding."""


# --help shows the flags of base classes in reverse order.
@dataclass(frozen=True, kw_only=True)
class ModelFlags(
    *reversed(model_parts()),  # type: ignore[misc]
    EmbeddingConfig,
    NormConfig,
    PositionsFlags,
    MLPFlags,
    AttentionFlags,
    _Network,
    _Sizes,
):
    """Model: the shape of the network."""

    def resolve(self) -> ModelConfig:
        """Resolve the flags as if no others were given. Raises ConfigError on contradictions."""
        given = {
            field.name: Setting(getattr(self, field.name), f"flag {flag_of(field)}")
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return resolve_model(self, ConfigResolver([ModelFlags], given))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Network):
    """Fully resolved configuration of a network.

    In an encoder-decoder model ``num_layers`` and ``seq_length`` are the encoder's. The fields
    ``decoder_*`` are None without a decoder. ``decoder_seq_length`` is also None if only the data
    determine it.
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    attention: AttentionConfig = field(hash=False)  # speeds up hashing for cache lookups
    mlp: MLPConfig = field(hash=False)
    norm: NormConfig = field(hash=False)
    positions: PositionsConfig = field(hash=False)
    embedding: EmbeddingConfig = field(hash=False)
    vocabulary: Vocabulary = field(default=Vocabulary(), hash=False)
    decoder_num_layers: int | None = None
    decoder_seq_length: int | None = None
    parts: tuple[ModelPart, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if not self.parts:
            object.__setattr__(self, "parts", tuple(cls() for cls in model_parts()))

    def part(self, cls: type[Part]) -> Part:
        """Return a feature's part of the network."""
        return next(part for part in self.parts if isinstance(part, cls))

    def has(self, sublayer: str, layer: int) -> bool:
        """Return whether block ``layer`` has a sublayer, ``attention`` or ``mlp``."""
        return all(part.lacks(layer) != sublayer for part in self.parts)

    @property
    def rotated(self) -> int:
        """Number of channels per head that rotary position embeddings rotate."""
        of_parts = (part.head_widths() for part in self.parts)
        widths = next(filter(None, of_parts), (self.attention.kv_channels,) * 2)
        return int(widths[1] * self.positions.rotary_percent)

    @property
    def blocks(self) -> int:
        """Number of blocks in all stacks: also in a decoder or a second encoder."""
        further = sum(part.further_blocks(self) for part in self.parts)
        return self.num_layers + (self.decoder_num_layers or 0) + further

    @property
    def blocks_ahead(self) -> int:
        """Number of multi-token prediction blocks after the last layer."""
        return sum(part.blocks_ahead for part in self.parts)

    @property
    def token_types(self) -> int:
        """Number of rows of the token type embedding; 0 for no such embedding."""
        return 2 * self.bert_binary_head if self.num_tokentypes is None else self.num_tokentypes

    @property
    def head_activation(self) -> str:
        """Activation of the masked-LM head, one of
        :data:`~megatron.config.blocks.MLP_ACTIVATIONS`."""
        usual = "gelu_tanh" if self.mlp.openai_gelu else "gelu_erf"
        return self.lm_head_activation or usual

    @property
    def windows(self) -> tuple[Window, ...]:
        """Local attention of each block, as :meth:`AttentionConfig.window` returns it."""
        return tuple(self.attention.window(layer) for layer in range(self.num_layers))

    def with_vocabulary(self, size: int, tensor_size: int = 1) -> ModelConfig:
        """Return the same network with a token embedding for ``size`` tokens, padded for
        ``tensor_size`` tensor-parallel ranks."""
        return dataclasses.replace(self, vocabulary=self.embedding.vocabulary(size, tensor_size))

    def with_head_of(self, other: ModelConfig) -> ModelConfig:
        """Return the same network with the head of another one."""
        head = {name: getattr(other, name) for name in ("head", "num_labels", "label_names")}
        return dataclasses.replace(self, **head)

    @property
    def head_shown(self) -> str:
        """Description of the head for messages."""
        labels = f" for {self.num_labels} labels" if self.num_labels else ""
        return f"the head {self.head}{labels}"

    def flags(self) -> ModelFlags:
        """Return the flags that resolve to this network."""
        values = self.attention.flags() | self.mlp.flags() | self.positions.flags()
        biased = self.mlp.bias and self.attention.qkv_bias and self.attention.proj_bias
        for cls, part in (
            (_Network, self), (NormConfig, self.norm), (EmbeddingConfig, self.embedding),
            *((type(part), part) for part in self.parts),
        ):  # fmt: skip
            values |= shared(part, cls)
        values["add_mlp_bias"] = self.mlp.bias and not biased
        if biased:
            values |= {"add_qkv_bias": False, "add_attention_bias": False}
        return ModelFlags(
            **values,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            seq_length=self.seq_length,
            decoder_num_layers=self.decoder_num_layers,
            decoder_seq_length=self.decoder_seq_length,
            add_bias_linear=biased,
            unpadded_vocab_size=self.vocabulary.size or None,
            padded_vocab_size=self.vocabulary.padded or None,
        )

    def shaping(self) -> dict[str, Any]:
        """Return the field values that determine the parameters and their meaning, by name."""
        flags = self.flags()
        values = {name: getattr(flags, name) for name in names_of("weights", ModelFlags)}
        if self.positions.position_embedding_type == "learned_absolute":
            values["max_position_embeddings"] = self.positions.max_position_embeddings
        if self.head != "lm":
            # Other heads replace these two. Token types are compared by their resolved number.
            for name in ("bert_binary_head", "untie_embeddings_and_output_weights"):
                del values[name]
            values["num_tokentypes"] = self.token_types
        for part in self.parts:
            if part.idle:
                for name in names_of("weights", type(part)):
                    values.pop(name)
        return values | {"activation": self.mlp.activation}


def resolve_model(flags: ModelFlags, resolver: ConfigResolver) -> ModelConfig:
    """Resolve and check the network. Raises ConfigError if values are missing or contradictory."""
    layers, hidden, heads, length = resolver.require(
        "--use-checkpoint-args, which takes the sizes of the checkpoint of --load",
        num_layers=_by_either_name(flags, "num_layers", resolver),
        hidden_size=flags.hidden_size,
        num_attention_heads=flags.num_attention_heads,
        seq_length=_by_either_name(flags, "seq_length", resolver),
    )
    decoder_layers = _decoder_layers(flags, layers, resolver)
    bias = flags.add_bias_linear
    widths = head_widths(vars(flags))
    attention = resolve_attention(
        flags, layers, heads, hidden, bias, resolver, widths and widths[0]
    )
    mlp = resolve_mlp(flags, hidden, bias, resolver)
    positions = resolve_positions(
        flags,
        layers,
        length,
        flags.decoder_seq_length if flags.encoder_decoder else None,
        attention.kv_channels if widths is None else widths[1],
        resolver,
    )
    _check_attention(flags, attention, positions, resolver)
    refuse_contradictions(flags, resolver)
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
        decoder_num_layers=decoder_layers,
        decoder_seq_length=flags.decoder_seq_length,
        parts=tuple(
            cls(**shared(flags, cls)).resolve(layers, length, positions.longest, resolver)
            for cls in model_parts()
        ),
    )


def _decoder_layers(flags: ModelFlags, layers: int, resolver: ConfigResolver) -> int | None:
    """Return the decoder's number of blocks, by default the encoder's; None without a decoder."""
    if flags.encoder_decoder:
        given = flags.decoder_num_layers
        return resolver.fill("decoder_num_layers", given, layers, "num-layers")
    for name in ("decoder_num_layers", "decoder_seq_length"):
        resolver.check_unused(name, "a model that has an encoder and a decoder (T5)")
    return None


def _check_attention(
    flags: ModelFlags,
    attention: AttentionConfig,
    positions: PositionsConfig,
    resolver: ConfigResolver,
) -> None:
    """Raise ConfigError if this kind of model does not support the position encoding or window."""
    resolver.check(
        flags.encoder_decoder or positions.position_embedding_type != "relative",
        f"{resolver.show('position_embedding_type')} is for models with an encoder and a decoder "
        "(T5); give rope, alibi, learned_absolute or none",
    )
    if flags.encoder_decoder and attention.local is not None:
        raise ConfigError(
            f"{resolver.show(attention.local)}: a decoder attends to all of its encoder's text, "
            "and the blocks of both to all of their own; leave the window out"
        )
    if flags.sliding_window is None:
        resolver.check_unused("rotary_base_local", "--sliding-window")


def head_widths(flags: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the number of channels of a head and how many of them can be rotated, or None if no
    feature's ``flags``, by field name, determine them. See :meth:`ModelPart.head_widths`."""
    for cls in model_parts():
        names = {field.name for field in dataclasses.fields(cls)} & flags.keys()  # type: ignore[arg-type]
        widths = cls(**{name: flags[name] for name in names}).head_widths()
        if widths is not None:
            return widths
    return None


def _by_either_name(flags: ModelFlags, name: str, resolver: ConfigResolver) -> int | None:
    """Return the value of a flag that has a second name, ``--encoder-...``, as in Megatron."""
    given, again = getattr(flags, name), getattr(flags, f"encoder_{name}")
    if again is None:
        return given
    if resolver.origins[name].startswith("checkpoint"):
        given = None
    resolver.check(
        given in (None, again),
        f"{resolver.show(f'encoder_{name}')} contradicts {resolver.show(name)}, which is the same; "
        "give one of them",
    )
    return resolver.fill(name, given, again, resolver.flag(f"encoder_{name}"))
