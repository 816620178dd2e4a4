"""The samples of the GPT of a project, in the order of its training: those whose chunks have
neighbours.

Shape suffixes: N chunks, M tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError
from megatron.data.samples import SampleDataset
from megatron.data.sources import PARTS
from megatron.families import family_of
from megatron.run.run import Run
from megatron.training.plan import TrainingPlan


@dataclass(frozen=True)
class GPTSamples:
    """The samples of a part.

    Attributes:
        part: ``train``, ``valid`` or ``test``.
        samples: the dataset that training reads; it may have more samples.
        count: how many of them training reads.
    """

    part: str
    samples: SampleDataset[Any]
    count: int


def gpt_samples(run: Run) -> dict[str, GPTSamples]:
    """The samples of ``train``, ``valid`` and ``test`` of a run, without the parts that have none.
    Raises ValueError or OSError if the data cannot be used."""
    plan = TrainingPlan(run.config)
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    counts = dict(zip(PARTS, plan.sample_counts, strict=True))
    found = data.datasets(plan.sample_counts, plan.batch_sizes)
    samples: dict[str, SampleDataset[Any] | None] = {"train": found.train}
    for part, named in (("valid", found.valid), ("test", found.test)):
        if len(named) > 1:
            raise ConfigError(
                f"{', '.join(named)}: only one set for {part} can have neighbours; name one, or "
                "blend them"
            )
        samples[part] = next(iter(named.values()), None)
    return {
        part: GPTSamples(part, dataset, counts[part])
        for part, dataset in samples.items()
        if dataset is not None and counts[part]
    }


@dataclass(frozen=True)
class SampleChunks:
    """The chunks of the samples of a part, numbered over all samples.

    Attributes:
        part: the samples.
        chunks_per_sample: L.
        chunk_length: M.
        numbers: the datasets of the database by their prefix.
    """

    part: GPTSamples
    chunks_per_sample: int
    chunk_length: int
    numbers: Mapping[str, int]

    def __len__(self) -> int:
        return self.part.count * self.chunks_per_sample

    def read(
        self, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[frozenset[tuple[int, int]]]]:
        """The tokens of the chunks ``start`` up to ``stop``, int64 [N, M], and for each (dataset,
        document) of all documents of its sample that are of datasets of the database. Raises
        ValueError for a training sample that is of no dataset of the database."""
        tokens_NM = np.empty((stop - start, self.chunk_length), np.int64)
        documents: list[frozenset[tuple[int, int]]] = []
        while start < stop:
            sample, first = divmod(start, self.chunks_per_sample)
            last = min(self.chunks_per_sample, first + stop - start)
            tokens_T = self.part.samples[sample]
            within = tokens_T[first * self.chunk_length : last * self.chunk_length]
            filled = len(documents)
            tokens_NM[filled : filled + last - first] = within.reshape(-1, self.chunk_length)
            documents += [self._documents(sample)] * (last - first)
            start += last - first
        return tokens_NM, documents

    def _documents(self, sample: int) -> frozenset[tuple[int, int]]:
        pieces = self.part.samples.origin(sample)
        known = [piece for piece in pieces if piece.source in self.numbers]
        if self.part.part == "train" and len(known) < len(pieces):
            strange = next(piece.source for piece in pieces if piece.source not in self.numbers)
            raise ValueError(
                f"training sample {sample} is of {strange}, and the database of "
                f"{', '.join(self.numbers)}: its own text would be among its neighbours; run the "
                "stages from db-build on again, with another --retro-project-dir"
            )
        return frozenset((self.numbers[piece.source], piece.sequence) for piece in known)
