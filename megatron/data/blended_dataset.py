"""A dataset that takes samples of several, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from megatron.data.blend import blend_indices, sample_dtype
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.samples import Piece, SampleDataset, checked_index

# Part of every cache entry's name: raise it when the meaning of the arrays changes.
INDEX_VERSION = 1

Sample_co = TypeVar("Sample_co", covariant=True)


class BlendedDataset(Generic[Sample_co]):
    """Samples of several datasets, taken by weight."""

    def __init__(self, parts: Sequence[SampleDataset[Sample_co]], index: StoredArrays) -> None:
        self.parts = parts
        self._index = index

    @classmethod
    def build(
        cls,
        parts: Sequence[SampleDataset[Sample_co]],
        weights: Sequence[float],
        num_samples: int,
        cache: IndexCache,
        name: str,
    ) -> BlendedDataset[Sample_co]:
        """Blend `parts` by `weights`, which sum to 1, into `num_samples` samples."""
        assert len(parts) == len(weights)
        depends_on = {"version": INDEX_VERSION, "weights": list(weights), "samples": num_samples}

        def arrays() -> dict[str, np.ndarray]:
            dataset, sample = blend_indices(weights, num_samples)
            return {"dataset": dataset, "sample": sample}

        layout = {
            "dataset": (np.dtype(np.int16), (num_samples,)),
            "sample": (sample_dtype(num_samples), (num_samples,)),
        }
        return cls(parts, cache.arrays(f"blend-{name}", depends_on, arrays, layout))

    def __len__(self) -> int:
        return len(self._index["dataset"])

    def __getitem__(self, index: int, /) -> Sample_co:
        dataset, sample = self._place(index)
        return dataset[sample]

    def origin(self, index: int, /) -> Sequence[Piece]:
        """Where sample `index` comes from, in the order of its tokens."""
        dataset, sample = self._place(index)
        return dataset.origin(sample)

    def _place(self, index: int) -> tuple[SampleDataset[Sample_co], int]:
        index = checked_index(index, len(self))
        part, sample = int(self._index["dataset"][index]), int(self._index["sample"][index])
        if not 0 <= part < len(self.parts) or not 0 <= sample < len(self.parts[part]):
            raise self._index.damaged(f"there is no sample {sample} of dataset {part}")
        return self.parts[part], sample
