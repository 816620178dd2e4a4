"""Interface that every model family implements."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, Settings
from megatron.config.features import kind_classes, model_parts
from megatron.data.pipeline import DataPipeline
from megatron.data.texts import ScoredText
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class GenerationSpec(NamedTuple):
    """Description of how a family's models generate text.

    Attributes:
        begin: builds the initial state from decoder tokens [1, S], their positions and the cache.
        max_positions: maximum length of the decoder's sequence, in tokens.
        encoder_layers: number of layers at the start of the list that read the prompt. 0 without
          an encoder: the prompt is then the beginning of the decoder's sequence.
        max_prompt: maximum number of tokens for the encoder. None without an encoder.
        start_token: first token of the decoder's sequence. None without an encoder.
        neighbors: a feature's description of the text to retrieve during generation. None
          without retrieval.
    """

    begin: Callable[[Tensor, Tensor, LayerCache], LayerState]
    max_positions: int
    encoder_layers: int = 0
    max_prompt: int | None = None
    start_token: int | None = None
    neighbors: Any = None


class BlockLengths(NamedTuple):
    """Sequence lengths of a repeated block, in tokens per sample.

    Attributes:
        own: length of the sequence of hidden states that the block computes.
        other: length of the sequence that its cross-attention reads. 0 without cross-attention.
        seen: number of tokens of ``own`` that a token attends to, if the sequence consists of
          independent parts. 0 means all tokens.
        other_seen: the same limit for tokens of ``other``.
        inside: lengths of the blocks that run inside this one.
    """

    own: int
    other: int = 0
    seen: int = 0
    other_seen: int = 0
    inside: tuple[BlockLengths, ...] = ()

    @property
    def whole(self) -> tuple[BlockLengths, ...]:
        """This block, followed by the blocks inside it."""
        return self, *self.inside

    @property
    def keys(self) -> int:
        """Number of tokens of ``own`` that a token attends to."""
        return self.seen or self.own

    @property
    def other_keys(self) -> int:
        """Number of tokens of ``other`` that a token attends to."""
        return self.other_seen or self.other


STREAM_FLAGS = frozenset({"reset_position_ids", "reset_attention_mask", "eod_mask_loss"}).union(
    *(kind.streams for kind in kind_classes().values())
)
"""Names of flags that apply only to samples cut from a continuous stream of documents."""


class Family(ABC):
    """Everything that differs between model families. No other code refers to a family by name."""

    name: ClassVar[str]
    """Name of the family in checkpoints and entry points."""
    generates: ClassVar[bool] = False
    """True if the models generate text token by token. :meth:`generation` is then defined."""
    tokenizer_type: ClassVar[str] = "GPT2BPETokenizer"
    """Default of ``--tokenizer-type`` when vocabulary files are given without it."""
    context_reader: ClassVar[Literal["decoder", "encoder"] | None] = None
    """Part of the model that reads the context when it scores a continuation. None if the models
    cannot predict text."""
    starts_from: ClassVar[frozenset[str]] = frozenset()
    """Other families whose weights can initialise this family's models. The models contain all of
    these weights under the same names, plus the ``added_parts`` of their `ModelSpec`."""
    scoring_note: ClassVar[str | None] = None
    """Note for users on how to read the scores that this family's models give to texts."""
    unused_flags: ClassVar[frozenset[str]] = frozenset()
    """Names of flags that affect other families but not this one. A run of this family refuses
    them. The flags that features define for other families are added automatically."""

    heads: ClassVar[frozenset[str]] = frozenset({"lm"})
    """Supported values of `ModelConfig.head`, the kind of output head."""
    head_states: ClassVar[int] = 0
    """Number of activations [H] stored per predicted token between final norm and output head."""

    def __init_subclass__(cls) -> None:
        for part in model_parts():
            if part.families is not None and cls.name not in part.families:
                cls.unused_flags |= {field.name for field in dataclasses.fields(part)}  # type: ignore[arg-type]

    def complete_settings(self, settings: Settings) -> Settings:
        """Return a run's settings, completed with the values that the family derives from them."""
        return settings

    @abstractmethod
    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        """Return a model's layer list, inputs and losses. Its vocabulary size must be set."""

    @abstractmethod
    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DataPipeline:
        """Return a run's data pipeline. Raises ValueError if flags contradict each other or the
        tokenizer."""

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        """Return the sizes that determine a sample's model FLOPs. The number of predicted tokens
        may depend on the data of ``run``. Without a run, the flags' defaults are assumed."""
        return TransformerShape.of(model)

    def generation(self, config: RunConfig, tokenizer: Tokenizer | None) -> GenerationSpec:
        """Return how a run's model continues text. Raises ValueError if the tokenizer lacks a
        required token."""
        raise AssertionError(f"models of the family {self.name} do not generate")

    def answered(
        self, model: ModelConfig, tokenizer: Tokenizer, prompt: str, answer: str
    ) -> ScoredText:
        """Return a prompt with one of its answers, in at most ``--seq-length`` tokens. A prompt
        that is too long is truncated. Raises ValueError if the tokenizer lacks a required token, or
        if the answer alone is too long."""
        raise self._scores_no_text()

    def scored_lengths(
        self, config: RunConfig, texts: Sequence[ScoredText]
    ) -> npt.NDArray[np.int64]:
        """Return the number of tokens that the model reads for each text, [n]. For a model with an
        encoder, return the encoder's and the decoder's numbers, [n, 2]. Raises ConfigError if the
        models do not predict text, or ValueError if a text exceeds the model's positions."""
        raise self._scores_no_text()

    def scored_batch(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        texts: Sequence[ScoredText],
        pad_to: Any = None,
    ) -> Any:
        """Return a micro batch whose targets are the tokens of the texts' continuations. It is
        padded to ``pad_to`` tokens (of the form that :meth:`scored_lengths` returns), by default to
        the longest text. Raises the same errors as that method."""
        raise self._scores_no_text()

    def _scores_no_text(self) -> ConfigError:
        return ConfigError(
            f"a model of the family {self.name} predicts no text from what is before it, so that "
            "it cannot score text"
        )

    def block_lengths(self, model: ModelConfig) -> tuple[BlockLengths, ...]:
        """Return the sequence lengths of each repeated block, in the order of the layer list. The
        last block's lengths also apply to the output head."""
        return (BlockLengths(model.seq_length),) * (model.num_layers + model.blocks_ahead)
