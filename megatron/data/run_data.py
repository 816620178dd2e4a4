"""What the data flags of a run mean, for any family of models."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np

from megatron.config import ConfigError, RunConfig
from megatron.config.flags import flag_of
from megatron.data.build import DatasetBuilder, Datasets, Kind
from megatron.data.corpora import Corpora, read_corpora
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.raw_text.files import is_raw_text
from megatron.data.remote import open_indexed
from megatron.data.samples import SampleDataset, SampleRecipe
from megatron.data.sources import INDEXED, PARTS, Parts, Reader, Source
from megatron.data.vocabulary import check_vocabulary
from megatron.tokenizer import Tokenizer

TEXT, INSTRUCTION, TFRECORD = "text", "instruction", "tfrecord"
KINDS = (INDEXED, TEXT, INSTRUCTION, TFRECORD)
"""Kinds of files; a corpora file names them as types."""

PLUGGED_IN = {
    TEXT: "megatron.data.raw_text.build:kind",
    INSTRUCTION: "megatron.data.instruction.kind:kind",
    TFRECORD: "megatron.data.masked.tfrecord_documents:kind",
}
"""What makes a :class:`Kind` of a run's data and a recipe; imported when a run has such files."""


def parts_of(config: RunConfig) -> Parts:
    """Which files a run is made of.

    Raises:
        ConfigError: flags contradict each other or cannot be read.
    """
    data, raw_text = config.data, config.raw_text

    def kind_of(path: str) -> str:
        if config.instruction.sft:
            return INSTRUCTION
        if config.masked_data.use_tfrecords:
            return TFRECORD
        return TEXT if is_raw_text(path, raw_text) else INDEXED

    corpora = Corpora()
    if data.train_data or data.valid_data or data.test_data:
        corpora = read_corpora(data.corpora_file, KINDS)
    return Reader(kind_of, raw_text.eval_text_key, corpora).parts(data)


def training_texts(config: RunConfig) -> Callable[[], Iterator[str]] | None:
    """The raw text that a run trains on, if any, for a tokenizer that has to be learned."""
    train = parts_of(config).train
    sources = [s for s in train.sources if s.kind == TEXT] if train is not None else []
    if not sources:
        return None
    texts = resolve_name("megatron.data.raw_text.build:training_texts")
    return lambda: texts(config.raw_text, sources)


class SampleView(NamedTuple):
    """One sample as the model gets it, for people."""

    tokens_S: np.ndarray
    loss_mask_S: np.ndarray
    text: str
    """Its text; what the loss does not ask for is in [[double brackets]]."""


class RunData(ABC):
    """The data of a run.

    Args:
        config: the run.
        tokenizer: of the run.
    """

    is_masked = False
    """Whether samples are made as --mask-prob and its like say."""
    unit = "document"
    """What a sequence of the files is; sentences are split from raw text on the way."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.seq_length: int = config.model.seq_length
        self.seed = config.training.seed

    @abstractmethod
    def kinds(self) -> dict[str, Callable[[], Kind]]:
        """What makes a reader of each kind of file that there can be; see `DatasetBuilder`."""

    @abstractmethod
    def collator(self) -> Callable[[Sequence[Any]], Any]:
        """What makes a batch of samples.

        Raises:
            ValueError: flags contradict each other or the tokenizer.
        """

    @abstractmethod
    def view(self, sample: Any, length: int) -> SampleView:
        """A sample for people, of which the model sees `length` tokens."""

    def mock(self, num_samples: int, part: int) -> SampleDataset[Any]:
        """Synthetic samples for --mock-data.

        Raises:
            ConfigError: there are none for this family.
        """
        raise ConfigError("--mock-data makes samples of a GPT; give --data-path")

    def datasets(self, sample_counts: tuple[int, int, int]) -> Datasets:
        """The samples of training, validation and test.

        Args:
            sample_counts: samples wanted of each.

        Raises:
            ValueError, OSError: flags or files that cannot be used; the message names them.
        """
        data = self.config.data
        if not data.mock_data:
            parts = parts_of(self.config)
            self._refuse_unused(parts)
            builder = DatasetBuilder(self.kinds(), data.data_cache_path)
            return builder.datasets(parts, sample_counts)
        train, *held_out = (
            {name: self.mock(count, part)} if count else {}
            for part, (name, count) in enumerate(zip(PARTS, sample_counts, strict=True))
        )
        return Datasets(train.get("train"), *held_out)

    def _refuse_unused(self, parts: Parts) -> None:
        """Flags that nothing in this run would follow are a mistake.

        Raises:
            ConfigError: there is one.
        """
        blends = [*parts.valid.values(), *parts.test.values()]
        blends += [parts.train] if parts.train else []
        kinds = {source.kind for blend in blends for source in blend.sources}
        config = self.config
        for part, is_used, why in (
            (config.raw_text, TEXT in kinds, "no data of this run is raw text"),
            (
                config.instruction,
                INSTRUCTION in kinds,
                "no data of this run are instructions (--sft, or the type instruction in the "
                "corpora file)",
            ),
            (config.masked_data, self.is_masked, "a GPT's data are not masked"),
            (
                config.fill_in_the_middle,
                config.fill_in_the_middle.fim_data,
                "it goes with --fim-data",
            ),
        ):
            for field in dataclasses.fields(part):
                if not is_used and getattr(part, field.name) != field.default:
                    raise ConfigError(f"{flag_of(field)} would change nothing: {why}")

    def cache(self, path: str) -> IndexCache:
        """Where the index arrays of a path are kept."""
        return IndexCache.beside(path, self.config.data.data_cache_path)

    def kind(self, name: str, recipe: SampleRecipe[Any] | None = None) -> Kind:
        """Files of one of :data:`PLUGGED_IN` as samples.

        Args:
            recipe: what makes the samples; None where the kind has a recipe of its own.
        """
        return resolve_name(PLUGGED_IN[name])(self, recipe)

    @cached_property
    def text_encoder(self) -> Any:
        """Makes tokens of raw text; one for all files, so that its tokenizer is loaded once."""
        return resolve_name("megatron.data.raw_text.build:text_encoder")(self)

    def open_indexed(self, path: str, source: Source) -> IndexedDataset:
        """Opens indexed files whose ids are all in the vocabulary; see `Kind.open`."""
        indexed = open_indexed(path, self.config.data.object_storage_cache_path)
        check_vocabulary(indexed, self.tokenizer.vocab_size, self.cache(path))
        return indexed
