"""Training, validation and test samples of a run, built from the files that its flags name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from megatron.data.blend import BlendedDataset, normalised_weights, part_samples
from megatron.data.corpora import READ_IN_PLACE, expand
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.data.samples import TRAINING, Documents, SampleDataset, SampleRecipe
from megatron.data.sources import PARTS, Blend, DataSource, Parts, split_documents
from megatron.util.digests import digest_of_parts, digest_of_sample
from megatron.util.processes import is_main_process

logger = logging.getLogger(__name__)


class Datasets(NamedTuple):
    """Datasets by split. Validation and test may have several, by name. A split is None or empty if
    no samples are requested or it contains no documents."""

    train: SampleDataset[Any] | None
    valid: Mapping[str, SampleDataset[Any]]
    test: Mapping[str, SampleDataset[Any]]


class SourceReader(NamedTuple):
    open: Callable[[str, DataSource], Documents]
    """Function that opens one path of a source. ValueError or OSError names an unusable file."""
    recipe: SampleRecipe[Any]


class Chosen(NamedTuple):
    source: DataSource
    path: str
    units: range


class Portion(NamedTuple):
    """Documents of a file that belong to one split of the data."""

    source: DataSource
    path: str
    documents: Documents
    """All documents of the file."""
    units: range
    """Indices of the split's units: documents or sequences, see `SampleRecipe.units`."""
    weight: float
    """Weight of the file in its blend. The weights in a blend sum to 1."""
    total: int
    """Number of units in the whole file."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the split's units. An estimate if units have several sequences."""
        lengths = self.documents.sequence_lengths
        if self.total == len(lengths):
            return int(lengths[self.units.start : self.units.stop].sum(dtype="int64"))
        return int(lengths.sum(dtype="int64")) * len(self.units) // max(1, self.total)


class PortionSize(NamedTuple):
    """Number of tokens in a :class:`Portion`, and the weight of its file."""

    weight: float
    tokens: int


class DataFile(NamedTuple):
    """File that a split of the data is built from."""

    part: str
    """Name of the split, such as ``train``, or ``valid`` followed by the name of the set."""
    path: str
    weight: float | None
    share: Sequence[float]
    """Range of the file's documents that is used, as fractions."""
    content: Mapping[str, int | str]
    """Values that identify the file's content, independently of its path."""


def content_of_files(path: str) -> Mapping[str, int | str]:
    """Return the size, number and digest of files that are tokenized during training. Counterpart
    of :meth:`IndexedDataset.content`."""
    files = expand(path, READ_IN_PLACE)
    blocks = max(2, 128 // len(files))
    return {
        "bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
        "sample": digest_of_parts(digest_of_sample(file, blocks) for file in files),
    }


@dataclass(frozen=True)
class DatasetBuilder:
    """Builder of datasets. Needs neither a GPU nor a process group. `readers` creates the reader
    for each kind of source when it is first needed, and may raise ValueError for that kind's flags.
    Without `cache_path`, index arrays are stored next to the data."""

    readers: Mapping[str, Callable[[], SourceReader]]
    cache_path: str | None = None
    exact: bool = False
    """True if recipes return all training samples in a fixed number of epochs."""
    _made: dict[str, SourceReader] = field(default_factory=dict)
    _opened: dict[tuple[str, str, str | None], Documents] = field(default_factory=dict)
    _contents: dict[str, Mapping[str, int | str]] = field(default_factory=dict)

    def datasets(self, parts: Parts, sample_counts: tuple[int, int, int]) -> Datasets:
        """Return all datasets of a run. `sample_counts` are the samples needed for training, per
        validation set and per test set. Raises ValueError or OSError for unusable files."""
        for_train, *for_held_out = sample_counts
        if for_train and parts.train is None:
            raise ValueError(
                "no training data: give --data-path, --train-data-path or --train-data (or "
                "--mock-data)"
            )
        train = self.samples(parts.train, "train", for_train) if parts.train else None
        valid, test = (
            {
                name: samples
                for name, blend in getattr(parts, part).items()
                if (samples := self.samples(blend, part, count, name)) is not None
            }
            for part, count in zip(PARTS[1:], for_held_out, strict=True)
        )
        return Datasets(train, valid, test)

    def samples(
        self, blend: Blend, part: str, num_samples: int, name: str | None = None
    ) -> SampleDataset[Any] | None:
        """Return the samples of one blend, or None if none are requested or no file has documents
        in the split. A file without any is an error, except that --split may leave validation or
        test empty, with a warning, so that a small corpus trains. Raises like :meth:`datasets`."""
        if not num_samples:
            return None
        weighed = self._weighed(blend, part)
        if not weighed:
            return None
        name = part if name in (None, part) else f"{part}-{name}"
        if blend.is_plain:
            return self._single(weighed[0][0], num_samples, name)
        weights = [weight for _, weight in weighed]
        samples = [
            self._single(chosen, part_samples(num_samples, weight), name)
            for chosen, weight in weighed
        ]
        if self.exact and part == TRAINING:
            pairs = zip(samples, weights, strict=True)
            num_samples = max(1, min(int((len(each) - 1) / weight) for each, weight in pairs))
        cache = IndexCache.next_to(weighed[0][0].path, self.cache_path)
        return BlendedDataset.build(samples, weights, num_samples, cache, name)

    def portions(self, blend: Blend, part: str) -> list[Portion]:
        """Return a blend's documents in one split, file by file. Raises like :meth:`datasets`."""
        return [
            Portion(
                source,
                path,
                self._documents(source, path),
                units,
                weight,
                self._total(source, path),
            )
            for (source, path, units), weight in self._weighed(blend, part)
        ]

    def contents(self, parts: Parts) -> list[DataFile]:
        """Return the files that have been opened for a run, with digests of their contents."""
        files = []
        train = {} if parts.train is None else {PARTS[0]: parts.train}
        for part, blends in zip(PARTS, (train, parts.valid, parts.test), strict=True):
            for name, blend in blends.items():
                for source in blend.sources:
                    for path in source.paths:
                        documents = self._opened.get((source.kind, path, source.text_key))
                        if documents is not None:
                            of = part if name == part else f"{part} {name}"
                            own = self._content(path, documents)
                            files.append(DataFile(of, path, source.weight, source.share, own))
        return files

    def _content(self, path: str, documents: Documents) -> Mapping[str, int | str]:
        if path not in self._contents:
            if isinstance(documents, IndexedDataset):
                self._contents[path] = documents.content()
            else:
                self._contents[path] = content_of_files(path)
        return self._contents[path]

    def _chosen(self, blend: Blend, part: str) -> list[list[Chosen]]:
        """Return, for each source, the files that have documents in the split."""
        groups = []
        for source in blend.sources:
            files = []
            for path in source.paths:
                units = self._units(blend, source, path)
                if units:
                    files.append(Chosen(source, path, units))
                    continue
                problem = self._why_empty(blend, part, source, path)
                if part == "train" or blend.split is None:
                    raise ValueError(problem)
                tell = logger.warning if is_main_process() else logger.debug  # same on every rank
                tell(problem)
            if files:
                groups.append(files)
        return groups

    def _weighed(self, blend: Blend, part: str) -> list[tuple[Chosen, float]]:
        """Return the files that have documents in the split, with weights that sum to 1."""
        groups = self._chosen(blend, part)
        chosen = list(chain.from_iterable(groups))
        if blend.is_plain or not chosen:
            return [(each, 1.0) for each in chosen]
        weights = normalised_weights(self._weights(blend.flag, groups), blend.flag)
        return list(zip(chosen, weights, strict=True))

    def _single(self, chosen: Chosen, num_samples: int, name: str) -> SampleDataset[Any]:
        source, path, units = chosen
        cache = IndexCache.next_to(path, self.cache_path)
        recipe = self.reader(source.kind).recipe
        return recipe.build(self._documents(source, path), units, num_samples, name, cache)

    def reader(self, kind: str, path: str = "") -> SourceReader:
        if kind not in self.readers:
            raise ValueError(
                f"{path}: this model cannot be trained on data of the type {kind} (TFRecords are "
                f"for BERT, instructions for a GPT), only on {', '.join(self.readers)}"
            )
        if kind not in self._made:
            self._made[kind] = self.readers[kind]()
        return self._made[kind]

    def _documents(self, source: DataSource, path: str) -> Documents:
        key = (source.kind, path, source.text_key)
        if key not in self._opened:
            self._opened[key] = self.open(source, path)
        return self._opened[key]

    def open(self, source: DataSource, path: str) -> Documents:
        source.make()
        return self.reader(source.kind, path).open(path, source)

    def _total(self, source: DataSource, path: str) -> int:
        documents = self._documents(source, path)
        return self.reader(source.kind).recipe.units(documents)

    def _units(self, blend: Blend, source: DataSource, path: str) -> range:
        try:
            total = self._total(source, path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{blend.flag} {path}: {error}") from None
        first, last = (round(bound * total) for bound in source.share)
        if blend.split is None:
            return range(first, last)
        within = split_documents(blend.split, last - first)[blend.part]
        return range(first + within.start, first + within.stop)

    def _why_empty(self, blend: Blend, part: str, source: DataSource, path: str) -> str:
        total = self._total(source, path)
        if not total:
            return f"{blend.flag}: {path} has no documents"
        if blend.split is None:
            first, last = source.share
            return (
                f"{blend.flag}: the range {first:g}:{last:g} of {path}, which has {total} "
                "documents, is empty"
            )
        return (
            f"--split {blend.split} gives {part} no document of {path}, which has {total}: set "
            f"the share of {part} to a larger value, or to 0 to do without it, or add documents"
        )

    def _weights(self, flag: str, groups: Sequence[Sequence[Chosen]]) -> list[float]:
        """Return the weight of each file: its source's weight, divided in proportion to tokens."""
        missing = [files[0].path for files in groups if files[0].source.weight is None]
        if missing and len(missing) < len(groups):
            raise ValueError(
                f"{flag}: some corpora have a weight and that of {missing[0]} has none; give each "
                "one, or none to weight them by their tokens"
            )
        weights = []
        for files in groups:
            weight = files[0].source.weight
            if weight is not None and len(files) == 1:
                weights.append(weight)
                continue
            sizes = [self._tokens(each) for each in files]
            whole = 1.0 if weight is None else weight / (sum(sizes) or 1.0)
            weights += [whole * size for size in sizes]
        return weights

    def _tokens(self, chosen: Chosen) -> float:
        source, path, units = chosen
        tokens = int(self._documents(source, path).sequence_lengths.sum(dtype="int64"))
        return tokens * len(units) / self._total(source, path)
