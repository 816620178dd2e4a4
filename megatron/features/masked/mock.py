"""Synthetic documents for ``--mock-data`` of BERT and T5: their samples are then made as usual."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import IndexCache
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import RepeatedSamples, SampleDataset, checked_range
from megatron.data.sources import PARTS
from megatron.features.masked.segment_samples import SegmentRecipe
from megatron.tokenizer.base import SpecialIds, TokenIds, Tokenizer, WordStarts
from megatron.util.digests import digest

DOCUMENTS = 256
SENTENCES = 4
"""Most of a document; it has at least two, which make a pair."""
MOST_SENTINELS = 100
SAMPLES = 2**16


class MockTokenizer(Tokenizer):
    """A tokenizer with all special tokens of BERT and T5: those that it lacks are its last ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        size, ids = tokenizer.vocab_size, dataclasses.asdict(tokenizer.special_ids)
        sentinels = ids.pop("sentinels")
        last = (i for i in range(size - 1, -1, -1) if i not in {*ids.values(), *sentinels})
        for name in ("cls", "sep", "pad", "mask", "eos"):
            if ids[name] is None:
                ids[name] = next(last)
        sentinels = sentinels or tuple(islice(last, min(MOST_SENTINELS, size // 4)))
        super().__init__("--mock-data", size, SpecialIds(**ids, sentinels=sentinels))
        special = [i for i in (*ids.values(), *sentinels) if i is not None]
        self.plain_ids: npt.NDArray[np.int64] = np.setdiff1d(np.arange(size), special)
        """The ids without a meaning of their own, ascending."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.detokenize(ids)

    def save_pretrained(self, directory: str | Path) -> None:
        self.tokenizer.save_pretrained(directory)

    def _encode(self, text: str) -> TokenIds:
        return np.asarray(self.tokenizer.tokenize(text), np.int32)

    def _find_word_starts(self) -> WordStarts:
        return self.tokenizer.word_starts.copy()


class MockDocuments:
    """Documents of two to :data:`SENTENCES` sentences, a function of (seed, part) alone. Each
    counts upwards through ``ids`` from a random one, so that masked tokens, and which sentence
    comes first, are learnt within a few steps. ``tokens`` is the mean length of a document."""

    prefix = "--mock-data"

    def __init__(self, ids_V: npt.NDArray[np.int64], tokens: int, seed: int, part: int) -> None:
        rng = np.random.default_rng([seed, part])
        counts_D = rng.integers(2, SENTENCES, DOCUMENTS, endpoint=True)
        self.document_indices = np.concatenate(([0], np.cumsum(counts_D)))
        shares_N = tokens / np.repeat(counts_D, counts_D)
        drawn_N = rng.uniform(0.5, 1.5, len(shares_N)) * shares_N
        self.sequence_lengths = np.maximum(drawn_N, 1).astype(np.int32)
        before_N = np.cumsum(self.sequence_lengths) - self.sequence_lengths
        first_D = rng.integers(len(ids_V), size=DOCUMENTS)
        in_document_N = before_N - np.repeat(before_N[self.document_indices[:-1]], counts_D)
        self._first_N = np.repeat(first_D, counts_D) + in_document_N
        self._ids_V = ids_V

    @cached_property
    def lengths_digest(self) -> str:
        return digest(self.sequence_lengths.data)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        index, stop = checked_range(self.sequence_lengths, index, offset, length, self.prefix)
        places = self._first_N[index] + np.arange(offset, stop)
        return self._ids_V[places % len(self._ids_V)]

    def verify(self) -> None:
        """Nothing can be damaged."""


def mock_data(data: DataPipeline, num_samples: int, part: int) -> SampleDataset[Any]:
    """`DataPipeline.mock` of a family whose recipe is a :class:`SegmentRecipe`."""
    tokenizer = MockTokenizer(data.tokenizer)
    recipe = type(data)(data.config, tokenizer).recipe()
    assert isinstance(recipe, SegmentRecipe)
    return mock_samples(recipe, tokenizer, num_samples, part)


def mock_samples(
    recipe: SegmentRecipe[Any], tokenizer: MockTokenizer, num_samples: int, part: int
) -> SampleDataset[Any]:
    """Samples of a recipe with this tokenizer; ``part`` is 0 for training, 1 validation, 2 test.
    After :data:`SAMPLES` they come again, however many a run asks for."""
    length = recipe.rules.max_tokens
    documents = MockDocuments(tokenizer.plain_ids, length, recipe.seed, part)
    units = range(recipe.units(documents))
    count = min(num_samples, SAMPLES)
    samples = recipe.build(documents, units, count, PARTS[part], IndexCache(None))
    return samples if count == num_samples else RepeatedSamples(samples, num_samples)
