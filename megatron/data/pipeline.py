"""The data of a run: from its flags to the batches that it trains on.

flags -> sources -> datasets of a family's samples -> their order in the run -> micro batches. What
depends on the model is in the family's subclass of :class:`DataPipeline`, what depends on the data
in a :class:`DataKind` each, in ``megatron/features/``.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from megatron.data.indexed import IndexedDataset
from megatron.data.indexed.dataset import TokenExtremes, mark_path, read_mark
from megatron.data.loader import TrainingData
from megatron.data.sampler import parse_skipped, without_samples
from megatron.data.samples import SampleDataset, SampleRecipe, SampleView, SequenceLengths
from megatron.data.sources import INDEXED, PARTS, DataSource, Parts, parts_of
from megatron.data.texts import ScoredText
from megatron.tokenizer import Tokenizer
from megatron.util.progress import progress_bar

logger = logging.getLogger(__name__)

BatchSizes = Callable[[], Sequence[tuple[int, int]]]
"""Returns the batch sizes of a run in turn: (size, number of steps)."""


class SampleTokens(NamedTuple):
    """Ids of the tokens that samples are padded and separated by."""

    pad: int
    eod: int


class DataKind:
    """The implementation of a kind of data, which a feature returns; the flags of its section
    decide which of these methods are called."""

    def reader(self, data: DataPipeline) -> SourceReader:
        """The reader of files of this kind; ValueError if flags contradict each other."""
        raise AssertionError(f"{self} reads no files")

    def texts(self, config: RunConfig, sources: Sequence[DataSource]) -> Iterator[str]:
        """The texts of all files, to train a tokenizer on."""
        raise AssertionError(f"{self} has no text")

    def recipe(self, data: DataPipeline, recipe: SampleRecipe[Any]) -> SampleRecipe[Any]:
        """The recipe of a GPT's samples, made from `recipe`."""
        return recipe

    def special_tokens(self, data: DataPipeline) -> SampleTokens | None:
        """The tokens in a GPT's samples, if they differ from the tokenizer's."""
        return None

    def weighs(self, config: RunConfig) -> bool:
        """True if its batches have ``weights_2``, and may differ in length."""
        return False

    def needed(self, config: RunConfig, num_samples: int) -> int:
        """Number of the family's samples that `num_samples` in the order of the run are made of."""
        return num_samples

    def order(
        self,
        data: DataPipeline,
        train: SampleDataset[Any],
        num_samples: int,
        batch_sizes: BatchSizes,
    ) -> SampleDataset[Any]:
        """The training samples in the order in which a run may consume `num_samples` of them."""
        return train

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> Callable[[Sequence[Any]], Any]:
        """The function that makes a batch of samples, made from the family's `collate`."""
        return collate

    def views(self, data: DataPipeline, sample: Any) -> list[SampleView] | None:
        """The rows of a sample for people, if its samples have several."""
        return None

    def conversation(self, config: RunConfig, path: str) -> Any:
        """The first conversation of files of examples, for checks of their format; None if the kind
        has none."""
        return None

    def lengths(
        self, config: RunConfig, lengths: SequenceLengths, samples: Callable[[int], int]
    ) -> SequenceLengths:
        """The length of the samples of each step, made from `lengths`; ``samples`` returns the
        number of samples consumed after a number of steps."""
        return lengths


def kind_named(name: str) -> DataKind:
    """The kind of data whose flags are in a section."""
    (feature,) = (feature for feature in features().values() if name in feature.sections)
    kind: DataKind = feature.data_kind(name)
    return kind


def acting_kinds(config: RunConfig) -> list[DataKind]:
    """The kinds that change the samples of a run."""
    return [kind_named(name) for name in kind_classes() if config.part(name).acts]


def sequence_lengths(
    config: RunConfig, samples: Callable[[int], int] = lambda steps: 0
) -> SequenceLengths:
    """The length of the samples of each step of a run; see `DataKind.lengths`. Raises ConfigError
    if a length does not fit the run."""
    lengths = SequenceLengths(config.model.seq_length)
    for kind in acting_kinds(config):
        lengths = kind.lengths(config, lengths, samples)
    return lengths


def training_texts(config: RunConfig) -> Callable[[], Iterator[str]] | None:
    """The raw texts that a run trains on, if any, to train a tokenizer on."""
    train = parts_of(config).train
    for kind, name in file_kinds().items():
        if train is None or not kind_classes()[name].holds_text:
            continue
        sources = [source for source in train.sources if source.kind == kind]
        if sources:
            return partial(_texts, kind_named(name), config, sources)
    return None


def _texts(kind: DataKind, config: RunConfig, sources: Sequence[DataSource]) -> Iterator[str]:
    for source in sources:
        source.make()
    return kind.texts(config, sources)


class DataPipeline(ABC):
    """The data of a run; subclasses make a family's samples."""

    takes: ClassVar[frozenset[str]] = frozenset({DOCUMENTS})
    """Types of samples that the model can be trained on; see `KindConfig.samples`."""
    flags: ClassVar[frozenset[str]] = frozenset()
    """Kinds whose flags describe the family's own samples."""
    unit: ClassVar[str] = "document"
    """A sequence of the files; raw text is split into sentences as needed."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.seq_length: int = config.model.seq_length
        self.seed = config.training.seed
        self._said_unknown = False

    @property
    def reads_examples(self) -> bool:
        """True if samples, or some of them, are instructions and answers."""
        return False

    @property
    def identifies(self) -> bool:
        """True if batches have the keys of their samples, where the family's can."""
        return any(section.identifies_samples for section in self.config.sections)

    @abstractmethod
    def recipe(self) -> SampleRecipe[Any]:
        """The recipe that makes samples from documents; ValueError if flags contradict."""

    @abstractmethod
    def collator(self) -> Callable[[Sequence[Any]], Any]:
        """The function that makes a batch of samples; ValueError if flags contradict."""

    @abstractmethod
    def view(self, sample: Any, length: int) -> SampleView:
        """A sample for people, cut to the `length` tokens that the model reads."""

    def views(self, sample: Any, length: int) -> list[SampleView]:
        """The rows of a sample for people: one, unless a kind of data has samples of several."""
        views = (kind.views(self, sample) for kind in self.acting)
        return next(filter(None, views), None) or [self.view(sample, length)]

    @property
    def length_multiple(self) -> int:
        """Divisor of the lengths of batches that are padded to their longest row."""
        return self.config.parallel.length_divisor

    def answering(self) -> Callable[[Sequence[ScoredText], int], Any]:
        """The function that makes a batch of the model's family of texts and a length to pad them
        to on the right; the tokens of the continuations are predicted. ConfigError if its models do
        not continue text."""
        raise ConfigError("a model of this family continues no text, so that it has no answers")

    def ending(self) -> Callable[[Sequence[np.ndarray], int], Any]:
        """The function that makes a batch of token ids, int64 [L] each, and a length to pad them
        to, for a head that reads the last token of each; ConfigError if there is no such head."""
        raise ConfigError("a model of this family has no head that reads the last token")

    def mock(self, num_samples: int, part: int) -> SampleDataset[Any]:
        """Synthetic samples for --mock-data; ConfigError if the family has none."""
        raise ConfigError("--mock-data makes no samples of this family; give --data-path")

    def training_data(
        self, sample_counts: tuple[int, int, int], batch_sizes: BatchSizes
    ) -> TrainingData:
        """Datasets and collator; see :meth:`datasets`."""
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
        """The samples of training, validation and test; those of training in the order of the run,
        which may depend on `batch_sizes`. Raises ValueError or OSError for flags or files that
        cannot be used."""
        unordered = self._unordered(sample_counts)
        ranges = self.config.data.skip_samples
        train = self._ordered(unordered.train, sample_counts[0], batch_sizes, ranges)
        return unordered._replace(train=train)

    def files(self) -> list[DataFile]:
        """The files that :meth:`datasets` has opened."""
        return [] if self.config.data.mock_data else self.builder.contents(self.parts)

    def training_portions(self) -> list[Portion]:
        """The documents that the training samples are made of, file by file, in the order of the
        flags. Raises ValueError or OSError for files that cannot be used."""
        train = None if self.config.data.mock_data else self.parts.train
        return [] if train is None else self.builder.portions(train, PARTS[0])

    def training_sizes(self) -> list[PortionSize]:
        """Tokens of :meth:`training_portions`."""
        return [PortionSize(each.weight, each.tokens) for each in self.training_portions()]

    def samples_of(self, tokens: int) -> int | None:
        """Samples of a stream of so many tokens; None where every pass over it draws others."""
        return None

    def _ordered(
        self,
        train: SampleDataset[Any] | None,
        count: int,
        batch_sizes: BatchSizes,
        ranges: Sequence[str],
    ) -> SampleDataset[Any] | None:
        """The training samples in the order in which a run consumes ``count`` of them, without
        those of ``--skip-samples`` ranges."""
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
        """The samples of training, validation and test from which the run's samples are built."""
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
        """The files of the run."""
        return parts_of(self.config)

    @cached_property
    def acting(self) -> list[DataKind]:
        """The kinds of data that change samples."""
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
        """The cache for the index arrays of a path."""
        return IndexCache.next_to(path, self.config.data.data_cache_path)

    def open_indexed(self, path: str, source: DataSource) -> IndexedDataset:
        """Opens indexed files and checks that all ids are of the tokenizer, as far as it is known
        which one made them, and in the vocabulary."""
        indexed = open_indexed(path, self.config.data.object_storage_cache_path)
        self._check_tokenizer(path)
        check_vocabulary(indexed, self.tokenizer.vocab_size, self.cache(path))
        return indexed

    def _check_tokenizer(self, path: str) -> None:
        """Raises ValueError if another tokenizer made indexed files than the run's. A run that
        names none (--vocab-size) has nothing to compare."""
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
        from megatron.tokenizer.mark import mark_of  # not every run has indexed files

        return mark_of(self.tokenizer, self.config.tokenizer.tokenizer_type)


def open_indexed(prefix: str, cache_path: str | None = None) -> IndexedDataset:
    """The indexed dataset of a path or URL, whose fetched parts are kept in `cache_path`; errors:
    see `IndexedDataset`; ConfigError if no feature reads the URL."""
    if "://" not in prefix:
        return IndexedDataset(prefix)
    for feature in features().values():
        remote: IndexedDataset | None = feature.open_url(prefix, cache_path)
        if remote is not None:
            return remote
    raise ConfigError(f"{prefix}: data at an address cannot be read; give a path")


def check_vocabulary(indexed: IndexedDataset, vocab_size: int, cache: IndexCache) -> None:
    """Check that all token ids are below `vocab_size`; ValueError otherwise. Reads the whole .bin
    once; the result is cached by the file's size, date and lengths. A remote file is checked as it
    is read."""
    if indexed.dtype.kind not in "iu":
        raise ValueError(
            f"{indexed.prefix}.bin contains {indexed.dtype.name} values, not token ids"
        )
    limits = np.iinfo(indexed.dtype)
    if limits.min >= 0 and limits.max < vocab_size:
        return  # every value of the dtype is in the vocabulary
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
