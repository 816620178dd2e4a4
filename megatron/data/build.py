"""The training, validation and test samples of a run, out of whatever files its flags name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.data.blend import normalised_weights, part_samples
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.index_cache import IndexCache
from megatron.data.samples import Documents, SampleDataset, SampleRecipe
from megatron.data.sources import PARTS, Blend, Parts, Source
from megatron.data.split import share_documents, split_documents

logger = logging.getLogger(__name__)


class Datasets(NamedTuple):
    """Samples by part; validation and test may have several sets, by name.

    Nothing is there where no samples are wanted or the split gives a part no documents.
    """

    train: SampleDataset[Any] | None
    valid: Mapping[str, SampleDataset[Any]]
    test: Mapping[str, SampleDataset[Any]]


class SourceReader(NamedTuple):
    """How files of one kind become samples."""

    open: Callable[[str, Source], Documents]
    """Opens one path of a source; the cache of an opened path is up to `DatasetBuilder`.

    Raises ValueError, OSError for files that cannot be used; the message names them."""
    recipe: SampleRecipe[Any]


Chosen = tuple[str, range]
"""A path, and the documents of it that belong to a part."""


@dataclass(frozen=True)
class DatasetBuilder:
    """Builds datasets; needs neither a GPU nor a process group, so it can be run beforehand.

    Args:
        readers: what makes a reader of each of the sources' kinds, when the first one is met; may
            raise ValueError for flags that contradict that kind only.
        cache_path: folder of the index arrays; None: beside the data.
    """

    readers: Mapping[str, Callable[[], SourceReader]]
    cache_path: str | None = None
    _made: dict[str, SourceReader] = field(default_factory=dict)
    _opened: dict[tuple[str, str, str | None], Documents] = field(default_factory=dict)

    def datasets(self, parts: Parts, sample_counts: tuple[int, int, int]) -> Datasets:
        """All samples of a run.

        Args:
            sample_counts: samples wanted for training, and for each set of validation and test.

        Raises:
            ValueError, OSError: files that cannot be used; the message names flag and file.
        """
        wanted = dict(zip(PARTS, sample_counts, strict=True))
        if wanted["train"] and parts.train is None:
            raise ValueError(
                "no training data: give --data-path, --train-data-path or --train-data (or "
                "--mock-data)"
            )
        train = self.samples(parts.train, "train", wanted["train"]) if parts.train else None
        held_out = [
            {
                name: samples
                for name, blend in blends.items()
                if (samples := self.samples(blend, part, wanted[part], name)) is not None
            }
            for part, blends in (("valid", parts.valid), ("test", parts.test))
        ]
        return Datasets(train, *held_out)

    def samples(
        self, blend: Blend, part: str, num_samples: int, name: str | None = None
    ) -> SampleDataset[Any] | None:
        """The samples of one blend; None when none are wanted.

        A file of which a split gives validation or test no document is left out of them, with a
        warning: the default split does that to the test part of a small corpus, which is no reason
        not to train on it. None also where that leaves none.

        Raises:
            ValueError, OSError: see :meth:`datasets`.
        """
        if not num_samples:
            return None
        chosen = [
            [(path, self._units(blend, source, path)) for path in source.paths]
            for source in blend.sources
        ]
        for problem in self._empty(blend, part, chosen):
            if part == "train" or blend.split is None:
                raise ValueError(problem)
            logger.warning(problem)
        sources, chosen = self._filled(blend.sources, chosen)
        if not sources:
            return None
        name = part if name in (None, part) else f"{part}-{name}"
        files = [
            (source, path, units, weight)
            for source, paths, weights in zip(
                sources, chosen, self._weights(blend.flag, sources, chosen), strict=True
            )
            for (path, units), weight in zip(paths, weights, strict=True)
        ]
        if blend.is_plain:
            source, path, units, _ = files[0]
            return self._single(source, path, units, num_samples, name)
        weights = normalised_weights([weight for *_, weight in files], blend.flag)
        samples = [
            self._single(source, path, units, part_samples(num_samples, weight), name)
            for (source, path, units, _), weight in zip(files, weights, strict=True)
        ]
        cache = IndexCache.beside(files[0][1], self.cache_path)
        return BlendedDataset.build(samples, weights, num_samples, cache, name)

    def _single(
        self, source: Source, path: str, units: range, num_samples: int, name: str
    ) -> SampleDataset[Any]:
        cache = IndexCache.beside(path, self.cache_path)
        recipe = self._reader(source).recipe
        return recipe.build(self._documents(source, path), units, num_samples, name, cache)

    def _reader(self, source: Source) -> SourceReader:
        name = source.kind
        if name not in self.readers:
            raise ValueError(
                f"{source.paths[0]}: this model has no use for data of the type {name} (TFRecords "
                "are for BERT, instructions for a GPT); what it can be trained on is "
                f"{', '.join(self.readers)}"
            )
        if name not in self._made:
            self._made[name] = self.readers[name]()
        return self._made[name]

    def _documents(self, source: Source, path: str) -> Documents:
        key = (source.kind, path, source.text_key)
        if key not in self._opened:
            self._opened[key] = self._reader(source).open(path, source)
        return self._opened[key]

    def _units(self, blend: Blend, source: Source, path: str) -> range:
        """The documents of a file that belong to the part."""
        try:
            documents = self._documents(source, path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{blend.flag} {path}: {error}") from None
        total = self._reader(source).recipe.units(documents)
        chosen = share_documents(source.share, total)
        if blend.split is None:
            return chosen
        within = split_documents(blend.split, len(chosen))[blend.part]
        return range(chosen.start + within.start, chosen.start + within.stop)

    def _empty(self, blend: Blend, part: str, chosen: Sequence[Sequence[Chosen]]) -> Iterator[str]:
        """What is wrong with each file that has no documents for the part."""
        for source, paths in zip(blend.sources, chosen, strict=True):
            for path, units in paths:
                if units:
                    continue
                total = self._reader(source).recipe.units(self._documents(source, path))
                if not total:
                    yield f"{blend.flag}: {path} holds no documents"
                elif blend.split is None:
                    first, last = source.share
                    yield (
                        f"{blend.flag}: the range {first:g}:{last:g} of {path}, which has {total} "
                        "documents, holds none"
                    )
                else:
                    yield (
                        f"--split {blend.split} gives {part} no document of {path}, which has "
                        f"{total}: give {part} a larger share, or 0 to do without it, or more "
                        "documents"
                    )

    def _filled(
        self, sources: Sequence[Source], chosen: Sequence[Sequence[Chosen]]
    ) -> tuple[list[Source], list[list[Chosen]]]:
        """Without the files that have no documents for the part."""
        filled = [[(path, units) for path, units in paths if units] for paths in chosen]
        kept = [(s, paths) for s, paths in zip(sources, filled, strict=True) if paths]
        return [source for source, _ in kept], [paths for _, paths in kept]

    def _weights(
        self, flag: str, sources: Sequence[Source], chosen: Sequence[Sequence[Chosen]]
    ) -> list[list[float]]:
        """The weight of each file: its source's, shared out by tokens."""
        given = [source.weight is not None for source in sources]
        if any(given) and not all(given):
            missing = sources[given.index(False)].paths[0]
            raise ValueError(
                f"{flag}: some corpora have a weight and that of {missing} has none; give each "
                "one, or none to count their tokens"
            )
        weights = []
        for source, paths in zip(sources, chosen, strict=True):
            if source.weight is not None and len(paths) == 1:
                weights.append([source.weight])
                continue
            sizes = [self._tokens(source, path, units) for path, units in paths]
            whole = 1.0 if source.weight is None else source.weight / (sum(sizes) or 1.0)
            weights.append([whole * size for size in sizes])
        return weights

    def _tokens(self, source: Source, path: str, units: range) -> float:
        """Tokens of some of the documents of a file, as if all were of one length."""
        documents = self._documents(source, path)
        total = self._reader(source).recipe.units(documents)
        return int(documents.sequence_lengths.sum(dtype="int64")) * len(units) / total
