"""Interface of a family of models."""

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
from megatron.model.caches import LayerCache
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec
from megatron.tokenizer import Tokenizer


class GenerationSpec(NamedTuple):
    """Text generation by the models of a family.

    Attributes:
        begin: the initial state of tokens [1, S] of the decoder, their positions and the cache.
        max_positions: of a sequence of the decoder.
        encoder_layers: how many layers of the list read the prompt, before those of the decoder; 0
            without an encoder, where the prompt begins the sequence.
        max_prompt: tokens that the encoder reads at most; None without an encoder.
        start_token: what the decoder begins with; None without an encoder.
        neighbors: a description, by a feature, of text that is
            retrieved as the text grows; None without retrieval.
    """

    begin: Callable[[Tensor, Tensor, LayerCache], LayerState]
    max_positions: int
    encoder_layers: int = 0
    max_prompt: int | None = None
    start_token: int | None = None
    neighbors: Any = None


class BlockLengths(NamedTuple):
    """Tokens of a sample in one of the repeated blocks.

    Attributes:
        own: of the hidden states that it computes.
        other: of the sequence that its cross-attention reads; 0 without cross-attention.
        seen: how many of its own a token attends to, where parts of them attend by themselves; 0
            for all.
        other_seen: the same of the other sequence.
        inside: blocks that run inside of this one.
    """

    own: int
    other: int = 0
    seen: int = 0
    other_seen: int = 0
    inside: tuple[BlockLengths, ...] = ()

    @property
    def whole(self) -> tuple[BlockLengths, ...]:
        """Yield this block and its inner blocks."""
        return self, *self.inside

    @property
    def keys(self) -> int:
        """Tokens of its own sequence that a token attends to."""
        return self.seen or self.own

    @property
    def other_keys(self) -> int:
        """Tokens of the other sequence that a token attends to."""
        return self.other_seen or self.other


STREAM_FLAGS = frozenset({"reset_position_ids", "reset_attention_mask", "eod_mask_loss"}).union(
    *(kind.streams for kind in kind_classes().values())
)
"""Fields of flags that only samples cut from a stream of documents depend on."""


class Family(ABC):
    """Everything that differs between families; the rest of the project names none of them."""

    name: ClassVar[str]
    """As in checkpoints and entry points."""
    generates: ClassVar[bool] = False
    """True if its models generate text, token by token: they have :meth:`generation`."""
    tokenizer_type: ClassVar[str] = "GPT2BPETokenizer"
    """The tokenizer of vocabulary files that are given without ``--tokenizer-type``."""
    context_reader: ClassVar[Literal["decoder", "encoder"] | None] = None
    """Part that reads the context of a text whose continuation its models predict; None if they do
    not predict text."""
    starts_from: ClassVar[frozenset[str]] = frozenset()
    """Other families from whose weights its models can start: they have all of these, by the same
    names, and ``added_parts`` of the `ModelSpec`."""
    scoring_note: ClassVar[str | None] = None
    """Note for users about the scores that its models give to texts of tasks."""
    unused_flags: ClassVar[frozenset[str]] = frozenset()
    """Fields of flags that its models and samples do not depend on, though those of other families
    do; a run refuses them. Those of features' parts of other families' models are added."""

    heads: ClassVar[frozenset[str]] = frozenset({"lm"})
    """Kinds of the last layer of its models, as `ModelConfig.head` says."""
    head_states: ClassVar[int] = 0
    """Hidden states that a predicted token keeps between the final norm and the output head."""

    def __init_subclass__(cls) -> None:
        for part in model_parts():
            if part.families is not None and cls.name not in part.families:
                cls.unused_flags |= {field.name for field in dataclasses.fields(part)}  # type: ignore[arg-type]

    def complete_settings(self, settings: Settings) -> Settings:
        """The settings of a run with what they leave to the family."""
        return settings

    @abstractmethod
    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        """Layer list, inputs and losses of a model with the vocabulary sizes filled in."""

    @abstractmethod
    def data(self, config: RunConfig, tokenizer: Tokenizer) -> DataPipeline:
        """The samples and batches of a run. Raises ValueError if flags contradict each other or the
        tokenizer."""

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        """The numbers that the model FLOPs of a sample depend on; without a run, whose data may
        decide how many tokens are predicted, those of the flags' defaults."""
        return TransformerShape.of(model)

    def generation(self, config: RunConfig, tokenizer: Tokenizer | None) -> GenerationSpec:
        """Return how a run's model continues text. Raises ValueError if the tokenizer lacks a token
        for it."""
        raise AssertionError(f"models of the family {self.name} do not generate")

    def answered(
        self, model: ModelConfig, tokenizer: Tokenizer, prompt: str, answer: str
    ) -> ScoredText:
        """A prompt with one of its answers, of at most ``--seq-length`` tokens: what does not fit
        of the prompt is left out. Raises ValueError if the tokenizer lacks a token for it, or an
        answer is too long."""
        raise self._scores_no_text()

    def scored_lengths(
        self, config: RunConfig, texts: Sequence[ScoredText]
    ) -> npt.NDArray[np.int64]:
        """Tokens that the model reads of each text, [n], or of encoder and decoder, [n, 2]. Raises
        ConfigError if models of this family do not predict text; ValueError if a text is longer
        than the model's positions."""
        raise self._scores_no_text()

    def scored_batch(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        texts: Sequence[ScoredText],
        pad_to: Any = None,
    ) -> Any:
        """A micro batch whose targets are the tokens of the texts' continuations, padded to lengths
        as :meth:`scored_lengths` gives, by default those of the longest. Raises what that
        raises."""
        raise self._scores_no_text()

    def _scores_no_text(self) -> ConfigError:
        return ConfigError(
            f"a model of the family {self.name} predicts no text from what is before it, so that "
            "it cannot score text"
        )

    def block_lengths(self, model: ModelConfig) -> tuple[BlockLengths, ...]:
        """The sequences of each repeated block, in the order of the layer list. Those of the last
        one are those of the head."""
        return (BlockLengths(model.seq_length),) * (model.num_layers + model.blocks_ahead)
