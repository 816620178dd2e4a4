"""Map-style datasets of GPT samples: one indexed file, or a blend of several."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron.data.blend import blend_indices
from megatron.data.gpt_index import build_gpt_index
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.indexed import IndexedDataset

# Part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1


class SampleDataset(Protocol):
    """What a loader reads: sample i is int64[seq_length + 1]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray: ...


class GPTDataset:
    """Samples of seq_length + 1 tokens out of one indexed file, in Megatron's order."""

    def __init__(self, indexed: IndexedDataset, seq_length: int, index: StoredArrays) -> None:
        self.indexed = indexed
        self.seq_length = seq_length
        self._index = index

    @classmethod
    def build(
        cls,
        indexed: IndexedDataset,
        documents: range,
        seq_length: int,
        num_samples: int,
        seed: int,
        cache: IndexCache,
        name: str,
    ) -> GPTDataset:
        """Build the sample order of `documents`, or take it from the cache.

        Args:
            documents: sequence numbers of `indexed` to read.
            seq_length: tokens a sample feeds to the model.
            num_samples: samples wanted; the dataset has at least as many.
            name: of the part ("train" ...), for messages and the cache.

        Raises:
            ValueError: the documents hold no tokens, or the .idx is damaged.
        """
        if not indexed.sequence_lengths[documents.start : documents.stop].any():
            raise ValueError(
                f"{indexed.prefix}: the {len(documents)} documents for {name} hold no tokens"
            )
        depends_on = {
            "version": INDEX_VERSION,
            "sequence lengths": indexed.lengths_digest,
            "documents": [documents.start, documents.stop],
            "seq length": seq_length,
            "samples": num_samples,
            "seed": seed,
        }

        def arrays() -> dict[str, np.ndarray]:
            indexed.verify()
            index = build_gpt_index(
                indexed.sequence_lengths, documents, seq_length, num_samples, seed
            )
            return {
                "document_index": index.document_index,
                "sample_index": index.sample_index,
                "shuffle_index": index.shuffle_index,
            }

        return cls(indexed, seq_length, cache.arrays(f"gpt-{name}", depends_on, arrays))

    def __len__(self) -> int:
        return len(self._index["shuffle_index"])

    def __getitem__(self, index: int, /) -> np.ndarray:
        index = _checked_index(index, len(self))
        samples, documents = self._index["sample_index"], self._index["document_index"]
        row = int(self._index["shuffle_index"][index])
        (first, offset), (last, last_offset) = samples[row].tolist(), samples[row + 1].tolist()
        tokens = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for position in range(first, last + 1):
            start = offset if position == first else 0
            length = last_offset + 1 - start if position == last else None
            part = self.indexed.get(int(documents[position]), start, length)
            tokens[filled : filled + len(part)] = part
            filled += len(part)
        assert filled == len(tokens)
        return tokens


class BlendedDataset:
    """Samples of several datasets, taken by weight."""

    def __init__(self, parts: Sequence[SampleDataset], index: StoredArrays) -> None:
        self.parts = parts
        self._index = index

    @classmethod
    def build(
        cls,
        parts: Sequence[SampleDataset],
        weights: Sequence[float],
        num_samples: int,
        cache: IndexCache,
        name: str,
    ) -> BlendedDataset:
        """Blend `parts` by `weights`, which sum to 1, into `num_samples` samples."""
        assert len(parts) == len(weights)
        depends_on = {"version": INDEX_VERSION, "weights": list(weights), "samples": num_samples}

        def arrays() -> dict[str, np.ndarray]:
            dataset, sample = blend_indices(weights, num_samples)
            return {"dataset": dataset, "sample": sample}

        return cls(parts, cache.arrays(f"blend-{name}", depends_on, arrays))

    def __len__(self) -> int:
        return len(self._index["dataset"])

    def __getitem__(self, index: int, /) -> np.ndarray:
        index = _checked_index(index, len(self))
        part = self.parts[int(self._index["dataset"][index])]
        return part[int(self._index["sample"][index])]


def _checked_index(index: int, length: int) -> int:
    index = operator.index(index)
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of a dataset of {length} samples")
    return index
