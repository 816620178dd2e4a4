"""A run's data, from its flags to the batches that it trains on.

The steps are: flags -> sources -> datasets of a family's samples -> their order in the run -> micro
batches. What depends on the model is in a family's subclass of :class:`DataPipeline`. What depends
on the kind of data is in a :class:`DataKind` in ``megatron/features/``.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megatron.config import ConfigError, RunConfig
from megatron.config.features import DOCUMENTS, features, file_kinds, kind_classes
from megatron.config.flags import flag_of
from megatron.data.build import (
    DataFile,
    DatasetBuilder,
    Datasets,
    Portion,
    PortionSize,
    SourceReader,
)
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset, TokenExtremes, mark_path, read_mark
from megatron.data.loader import TrainingData
from megatron.data.sampler import parse_skipped, without_samples
from megatron.data.samples import SampleDataset, SampleRecipe, SampleView, SequenceLengths
from megatron.data.sources import INDEXED, PARTS, DataSource, Parts, parts_of
from megatron.data.texts import ScoredText
from megatron.tokenizer import Tokenizer
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

BatchSizes = Callable[[], Sequence[tuple[int, int]]]
"""Function that returns a run's global batch sizes in order, as (size, number of steps)."""


class SampleTokens(NamedTuple):
    """Ids of the padding token and of the end-of-document token in samples."""

    pad: int
    eod: int


class DataKind:
    """Implementation of a kind of data, returned by a feature. The flags in the kind's section
    determine which of these methods are called."""

    def reader(self, data: DataPipeline) -> SourceReader:
        """Return the reader for files of this kind. Raises ValueError on contradictory flags."""
        raise AssertionError(f"{self} reads no files")

    def recipe(self, data: DataPipeline, recipe: SampleRecipe[Any]) -> SampleRecipe[Any]:
        """Return the recipe for a GPT's samples, given the ``recipe`` without this kind."""
        return recipe

    def special_tokens(self, data: DataPipeline) -> SampleTokens | None:
        """Return the special tokens of a GPT's samples, or None to use the tokenizer's."""
        return None

    def weighs(self, config: RunConfig) -> bool:
        """Return whether batches have ``weights_2``, and may differ in length."""
        return False

    def needed(self, config: RunConfig, num_samples: int) -> int:
        """Return how many samples of the family are needed for `num_samples` of the run."""
        return num_samples

    def order(
        self,
        data: DataPipeline,
        train: SampleDataset[Any],
        num_samples: int,
        batch_sizes: BatchSizes,
    ) -> SampleDataset[Any]:
        """Return the training samples in the order of the run, which may consume `num_samples`."""
        return train

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> Callable[[Sequence[Any]], Any]:
        """Return the function that collates samples, given the family's `collate`."""
        return collate

    def views(self, data: DataPipeline, sample: Any) -> list[SampleView] | None:
        """Return the human-readable rows of a sample, or None if it is a single row."""
        return None

    def conversation(self, config: RunConfig, path: str) -> Any:
        """Return the first conversation in the files at ``path`` for a format check, or None."""
        return None

    def lengths(
        self, config: RunConfig, lengths: SequenceLengths, samples: Callable[[int], int]
    ) -> SequenceLengths:
        """Return the sequence lengths of the run's steps, given the ``lengths`` without this kind.
        ``samples`` returns the number of samples consumed after a number of steps."""
        return lengths


def kind_named(name: str) -> DataKind:
    """Return the kind of data whose flags are in the section ``name``."""
    (feature,) = (feature for feature in features().values() if name in feature.sections)
    kind: DataKind = feature.data_kind(name)
    return kind


def acting_kinds(config: RunConfig) -> list[DataKind]:
    """Return the kinds of data that change a run's samples."""
    return [kind_named(name) for name in kind_classes() if config.part(name).acts]


def sequence_lengths(
    config: RunConfig, samples: Callable[[int], int] = lambda steps: 0
) -> SequenceLengths:
    """Return the sequence lengths of a run's steps; see `DataKind.lengths`. Raises ConfigError if a
    length is not possible in this run."""
    lengths = SequenceLengths(config.model.seq_length)
    for kind in acting_kinds(config):
        lengths = kind.lengths(config, lengths, samples)
    return lengths


class DataPipeline(ABC):
    """Base class for a run's data. Subclasses build the samples of a model family."""

    takes: ClassVar[frozenset[str]] = frozenset({DOCUMENTS})
    """Types of samples that the model can be trained on; see `KindConfig.samples`."""
    flags: ClassVar[frozenset[str]] = frozenset()
    """Kinds of data whose flags also apply to the family's own samples."""
    unit: ClassVar[str] = "document"
    """Text unit that each sequence in the files contains. Raw text is split accordingly."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.seq_length: int = config.model.seq_length
        self.seed = config.training.seed
        self._said_unknown = False

    @property
    def reads_examples(self) -> bool:
        """True if some or all samples are instructions and answers."""
        return False

    @property
    def identifies(self) -> bool:
        """True if batches need sample keys, which only some families support."""
        return any(section.identifies_samples for section in self.config.sections)

    @abstractmethod
    def recipe(self) -> SampleRecipe[Any]:
        """Return the recipe for samples of documents. Raises ValueError on invalid flags."""

    @abstractmethod
    def collator(self) -> Callable[[Sequence[Any]], Any]:
        """Return the function that collates samples. Raises ValueError on invalid flags."""

    @abstractmethod
    def view(self, sample: Any, length: int) -> SampleView:
        """Return a human-readable sample, cut to the `length` tokens that the model reads."""

    def views(self, sample: Any, length: int) -> list[SampleView]:
        """Return the human-readable rows of a sample: one, unless a kind of data has several."""
        views = (kind.views(self, sample) for kind in self.acting)
        return next(filter(None, views), None) or [self.view(sample, length)]

    @property
    def length_multiple(self) -> int:
        """Number that must divide the length of batches that are padded to their longest row."""
        return self.config.parallel.length_divisor

    def answering(self) -> Callable[[Sequence[ScoredText], int], Any]:
        """Return a function that builds a batch from texts and a length, to which it pads them on
        the right. The model predicts the continuations' tokens. Raises ConfigError if the family's
        models do not continue text."""
        raise ConfigError("a model of this family continues no text, so that it has no answers")

    def ending(self) -> Callable[[Sequence[np.ndarray], int], Any]:
        """Return a function that builds a batch from token ids, int64 [L] each, and a length to pad
        to, for a head that reads each last token. Raises ConfigError without such a head."""
        raise ConfigError("a model of this family has no head that reads the last token")

    def mock(self, num_samples: int, part: int) -> SampleDataset[Any]:
        """Return synthetic samples for --mock-data. Raises ConfigError if the family has none."""
        raise ConfigError("--mock-data makes no samples of this family; give --data-path")

    def training_data(
        self, sample_counts: tuple[int, int, int], batch_sizes: BatchSizes
    ) -> TrainingData:
        """Return the datasets and the collator; see :meth:`datasets`."""
        collate = self.collator()
        for kind in self.acting:
            collate = kind.collator(self, collate)
        unordered = self._unordered(sample_counts)
        ordered = partial(self._ordered, unordered.train, sample_counts[0], batch_sizes)
        weighed = self.reads_examples or any(kind.weighs(self.config) for kind in self.acting)
        data = TrainingData(unordered, collate, weighed, self.files, ordered, self.training_sizes)
        return data.skipping(self.config.data.skip_samples)

    def datasets(
        self, sample_counts: tuple[int, int, int], batch_sizes: BatchSizes = list
    ) -> Datasets:
        """Return the training samples, in the run's order, which may depend on `batch_sizes`, and
        validation and test samples. Raises ValueError or OSError for unusable flags or files."""
        unordered = self._unordered(sample_counts)
        ranges = self.config.data.skip_samples
        train = self._ordered(unordered.train, sample_counts[0], batch_sizes, ranges)
        return unordered._replace(train=train)

    def files(self) -> list[DataFile]:
        """Return the files that :meth:`datasets` has opened."""
        return [] if self.config.data.mock_data else self.builder.contents(self.parts)

    def training_portions(self) -> list[Portion]:
        """Return the documents that the training samples are built from, file by file, in the order
        of the flags. Raises ValueError or OSError if files are unusable."""
        train = None if self.config.data.mock_data else self.parts.train
        return [] if train is None else self.builder.portions(train, PARTS[0])

    def training_sizes(self) -> list[PortionSize]:
        """Return the size of each of the :meth:`training_portions`."""
        return [PortionSize(each.weight, each.tokens) for each in self.training_portions()]

    def samples_of(self, tokens: int) -> int | None:
        """Return the number of samples in ``tokens`` tokens, or None if it varies by epoch."""
        return None

    def _ordered(
        self,
        train: SampleDataset[Any] | None,
        count: int,
        batch_sizes: BatchSizes,
        ranges: Sequence[str],
    ) -> SampleDataset[Any] | None:
        """Return the training samples in the order in which a run consumes ``count`` of them,
        without the ``--skip-samples`` ranges. Raises ConfigError if there are fewer."""
        if train is None:
            return None
        wanted = count + sum(map(len, parse_skipped(ranges)))
        for kind in self.acting:
            train = kind.order(self, train, wanted, batch_sizes)
        epochs = self.config.data.train_data_exact_num_epochs
        if epochs is not None and len(train) < wanted:
            raise ConfigError(
                f"--train-data-exact-num-epochs {epochs} makes {len(train):,} training samples, "
                f"and the run needs {wanted:,}: give {-(-wanted * epochs // len(train))} epochs, "
                "or a shorter run"
            )
        return without_samples(train, ranges) if ranges else train

    def needed(self, sample_counts: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return how many samples of the family each split of the run needs."""
        train, *held_out = sample_counts
        for kind in self.acting:
            train = kind.needed(self.config, train)
        return (train, *held_out)  # type: ignore[return-value]

    def _unordered(self, sample_counts: tuple[int, int, int]) -> Datasets:
        sample_counts = self.needed(sample_counts)
        if not self.config.data.mock_data:
            self._refuse_unused()
            return self.builder.datasets(self.parts, sample_counts)
        train, *held_out = (
            {name: self.mock(count, part)} if count else {}
            for part, (name, count) in enumerate(zip(PARTS, sample_counts, strict=True))
        )
        return Datasets(train.get("train"), *held_out)

    @cached_property
    def parts(self) -> Parts:
        """Blends of files for the splits of the run's data."""
        return parts_of(self.config)

    @cached_property
    def acting(self) -> list[DataKind]:
        """Kinds of data that change this run's samples."""
        return acting_kinds(self.config)

    @cached_property
    def builder(self) -> DatasetBuilder:
        readers = {INDEXED: lambda: SourceReader(self.open_indexed, self.recipe())}
        for kind, name in file_kinds().items():
            if kind_classes()[name].samples in self.takes:
                readers[kind] = partial(self._reader, name)
        data = self.config.data
        exact = data.train_data_exact_num_epochs is not None
        return DatasetBuilder(readers, data.data_cache_path, exact)

    def _reader(self, name: str) -> SourceReader:
        epochs = self.config.data.train_data_exact_num_epochs
        if epochs is not None and kind_classes()[name].samples != DOCUMENTS:
            raise ConfigError(
                f"--train-data-exact-num-epochs {epochs} is for samples that are made of documents "
                "(indexed files, raw text); --epochs is the number of passes over others"
            )
        return kind_named(name).reader(self)

    def _refuse_unused(self) -> None:
        read = {source.kind for blend in self.parts.blends() for source in blend.sources}
        idle, shared = [], set[str]()
        for name in kind_classes():
            kind = self.config.part(name)
            if (kind.files in read and kind.samples in self.takes) or kind.acts:
                shared |= kind.shares
            elif name not in self.flags:
                idle.append(kind)
        for kind in idle:
            for field in dataclasses.fields(kind):
                if field.name in shared:
                    continue
                if getattr(kind, field.name) != field.default:
                    raise ConfigError(f"{flag_of(field)} would change nothing: {kind.idle}")

    def cache(self, path: str) -> IndexCache:
        """Return the index cache for data at a path."""
        return IndexCache.next_to(path, self.config.data.data_cache_path)

    def open_indexed(self, path: str, source: DataSource) -> IndexedDataset:
        """Open indexed files. Raises ValueError if they are known to come from another tokenizer,
        or if an id is not in the vocabulary."""
        indexed = open_indexed(path, self.config.data.object_storage_cache_path)
        self._check_tokenizer(path)
        check_vocabulary(indexed, self.tokenizer.vocab_size, self.cache(path))
        return indexed

    def _check_tokenizer(self, path: str) -> None:
        """Raise ValueError if indexed files were made with another tokenizer than the run's. A run
        without a tokenizer (--vocab-size) is not checked."""
        if self._mark is None:
            return
        file, ours, source = mark_path(path), self._mark, self.tokenizer.source
        theirs = read_mark(file)
        if theirs is not None and theirs.digest != ours.digest:
            raise ValueError(
                f"{path}.bin was made with another tokenizer: {theirs}, and this run has {ours}, "
                f"{source}: name that tokenizer (--tokenizer-type ...), or preprocess the texts "
                f"with this one; or remove {file} if the ids mean the same"
            )
        if theirs is None and not self._said_unknown:
            self._said_unknown = True
            logger.info(
                "%s.bin: no %s says which tokenizer made it; its ids are taken to be those of %s",
                path, file.name, source,
            )  # fmt: skip

    @cached_property
    def _mark(self) -> Any:
        from megatron.tokenizer.mark import mark_of  # only for indexed files

        return mark_of(self.tokenizer, self.config.tokenizer.tokenizer_type)


def open_indexed(prefix: str, cache_path: str | None = None) -> IndexedDataset:
    """Open the indexed dataset at a path or URL. `cache_path` is the folder for downloaded parts.
    Raises like `IndexedDataset`, and ConfigError if no feature can read the URL."""
    if "://" not in prefix:
        return IndexedDataset(prefix)
    for feature in features().values():
        remote: IndexedDataset | None = feature.open_url(prefix, cache_path)
        if remote is not None:
            return remote
    raise ConfigError(f"{prefix}: data at an address cannot be read; give a path")


def check_vocabulary(indexed: IndexedDataset, vocab_size: int, cache: IndexCache) -> None:
    """Check that all token ids are below `vocab_size`, else raise ValueError. Reads the .bin
    once; the result is cached by size, modification time and lengths. Remote ids are checked
    when read."""
    if indexed.dtype.kind not in "iu":
        raise ValueError(
            f"{indexed.prefix}.bin contains {indexed.dtype.name} values, not token ids"
        )
    limits = np.iinfo(indexed.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return  # any value of the dtype is valid
    if indexed.limit_ids(vocab_size):
        return
    depends_on = {
        **indexed.bin_identity(),
        "dtype": indexed.dtype.name,
        "sequence lengths": indexed.lengths_digest,
    }
    layout = {"tokens_and_positions": (np.dtype(np.int64), (2, 2))}
    extremes = cache.arrays("token-range", depends_on, lambda: _extremes(indexed), layout)
    indexed.check_ids(extremes["tokens_and_positions"], vocab_size)


def _extremes(indexed: IndexedDataset) -> Mapping[str, np.ndarray]:
    logger.info("checking the token ids of %s.bin, once", indexed.prefix)
    extremes = TokenExtremes()
    with progress_bar("token ids", total=indexed.num_tokens, unit=" tokens") as bar:
        for start, tokens in indexed.token_blocks():
            extremes.add(start, tokens)
            bar.update(len(tokens))
    return {"tokens_and_positions": extremes.array()}
