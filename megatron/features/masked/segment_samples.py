"""Samples made of sentences: their text, and what the recipe of a family makes of it.

An index (segments.py) says which sentences a sample has; tokens beyond the longest length are cut
off here, and a recipe makes tokens, masks and labels of the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import (
    TRAINING,
    Documents,
    Piece,
    SampleDataset,
    check_ids,
    checked_index,
)
from megatron.features.masked.segments import (
    INDEX_VERSION,
    SegmentRules,
    build_packed_segments,
    build_segments,
    check_sentences,
    sample_rng,
)
from megatron.features.masked.sentence_numbers import (
    EXCEPTIONS,
    SentenceNumbers,
    Sentences,
    join,
    token_count,
    trimmed,
)
from megatron.util.digests import digest

Sample = TypeVar("Sample")


class SegmentRecipe(ABC, Generic[Sample]):
    """Samples of one or two segments of documents that are split into sentences."""

    cache_name: ClassVar[str]
    seed: int
    exact_epochs: int | None
    """Epochs of the training samples, however many are wanted."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Above the token ids of documents."""

    @property
    @abstractmethod
    def rules(self) -> SegmentRules:
        """How sentences are combined."""

    @abstractmethod
    def sample(
        self, texts: Sequence[npt.NDArray[np.int64]], is_random: bool, rng: np.random.Generator
    ) -> Sample:
        """The sample of one or two segments, the second of which may not follow the first."""

    @property
    def capacity(self) -> int | None:
        """Tokens of a row, special tokens included, where several samples are packed into each."""
        return None

    def packed(self, samples: Sequence[Sample]) -> Sample:
        """The samples of one row as one."""
        raise AssertionError(f"{self} packs no samples")

    def units(self, documents: Documents) -> int:
        return len(documents.document_indices) - 1

    def build(
        self, documents: Documents, units: range, num_samples: int, name: str, cache: IndexCache
    ) -> SampleDataset[Sample]:
        """`num_samples` samples of the documents `units`, or packed rows of them; see
        `SampleRecipe.build`. Raises ValueError if no sample can be made from the documents."""
        rules, capacity = self.rules, self.capacity
        check_sentences(documents, rules)
        boundaries = documents.document_indices[units.start : units.stop + 1]
        epochs = self.exact_epochs if name == TRAINING else None
        depends_on = {
            "version": INDEX_VERSION,
            "sequence lengths": documents.lengths_digest,
            "documents": [units.start, units.stop],
            "document boundaries": digest(boundaries.tobytes()),
            "tokens": rules.max_tokens,
            "short sequences": rules.short_seq_prob,
            "pairs": rules.pairs,
            **({"samples": num_samples} if epochs is None else {"epochs": epochs}),
            "seed": self.seed,
            "part": name,
        }
        if capacity is not None:
            depends_on["packed"] = capacity

        def arrays() -> dict[str, np.ndarray]:
            documents.verify()
            sentences = Sentences.of(documents, units, rules.max_tokens)
            order = sentences, rules, num_samples, self.seed, name, documents.prefix
            if capacity is None:
                arrays_of_rows = {"segments": build_segments(*order, epochs)}
            else:
                segments, bounds = build_packed_segments(*order, capacity, epochs)
                arrays_of_rows = {"segments": segments, "bounds": bounds}
            return {**arrays_of_rows, **sentences.numbers.arrays()}

        index = cache.arrays(f"{self.cache_name}-{name}", depends_on, arrays)
        samples = SegmentDataset(documents, self, int(boundaries[0]), name, index)
        return samples if capacity is None else PackedRows(samples, index["bounds"])


class SegmentDataset(Generic[Sample]):
    """Samples by number; made by `SegmentRecipe.build`."""

    def __init__(
        self,
        documents: Documents,
        recipe: SegmentRecipe[Sample],
        first_sequence: int,
        name: str,
        index: StoredArrays,
    ) -> None:
        self.documents, self.recipe, self.name = documents, recipe, name
        self._rules = recipe.rules
        self._first_sequence = first_sequence
        self._index = index

    def __len__(self) -> int:
        return len(self._index["segments"])

    def __getitem__(self, index: int, /) -> Sample:
        segments, is_random, rng = self._segments(index)
        texts = [join(self.documents, pieces) for pieces in segments]
        check_ids(np.concatenate(texts), self.recipe.vocab_size, index, self.origin)
        return self.recipe.sample(texts, is_random, rng)

    def origin(self, index: int, /) -> list[Piece]:
        """Where the text of sample `index` comes from, before tokens of it are replaced."""
        return [piece for pieces in self._segments(index)[0] for piece in pieces]

    def _segments(self, index: int) -> tuple[list[list[Piece]], bool, np.random.Generator]:
        """The segments of a sample, whether the second does not follow the first, and the random
        numbers for the rest."""
        index = checked_index(index, len(self))
        rng = sample_rng(self.recipe.seed, self.name, index)
        limit = self._rules.max_tokens
        exceptions = (self._index[name] for name in EXCEPTIONS)
        numbers = SentenceNumbers(self._first_sequence, limit, *exceptions)
        row = self._index["segments"][index].tolist()
        segments = [numbers.pieces(self.documents, *row[i : i + 2]) for i in range(0, len(row), 2)]
        is_random = False
        if self._rules.pairs == "next-sentence":
            is_random = row[2] != row[1]
        elif self._rules.pairs == "sentence-order":
            is_random = bool(rng.random() < 0.5)
            if is_random:
                segments.reverse()
        for i, cut in enumerate(surplus([token_count(pieces) for pieces in segments], limit)):
            if cut:
                # Each token is cut off at the front or the back with equal probability.
                front = int(rng.binomial(cut, 0.5))
                segments[i] = trimmed(segments[i], front, cut - front)
        return segments, is_random, rng


class PackedRows(Generic[Sample]):
    """Rows of several samples; `bounds` are the first samples of the rows, and their number."""

    def __init__(self, samples: SegmentDataset[Sample], bounds: npt.NDArray[np.int64]) -> None:
        self.samples, self._bounds = samples, bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int, /) -> Sample:
        return self.samples.recipe.packed([self.samples[i] for i in self._numbers(index)])

    def origin(self, index: int, /) -> list[Piece]:
        """See `SegmentDataset.origin`."""
        return [piece for i in self._numbers(index) for piece in self.samples.origin(i)]

    def _numbers(self, index: int) -> range:
        index = checked_index(index, len(self))
        return range(*self._bounds[index : index + 2].tolist())


def surplus(lengths: list[int], limit: int) -> list[int]:
    """Tokens to cut off one or two segments, so that they have `limit` tokens together. As in
    google-research/bert one token at a time is cut off the longer one, and off the second if they
    are equally long."""
    excess = max(0, sum(lengths) - limit)
    if len(lengths) == 1:
        return [excess]
    first, second = lengths
    longer = min(excess, abs(first - second))
    of_both = excess - longer
    off_first = (longer if first > second else 0) + of_both // 2
    return [off_first, excess - off_first]
