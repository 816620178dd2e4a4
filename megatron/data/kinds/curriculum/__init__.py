"""Curricula: sequences that grow longer, and samples drawn by their difficulty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.config import RunConfig
from megatron.config.kinds.curriculum import CurriculumConfig, data_sampling, sequence_lengths
from megatron.data.index_cache import IndexCache
from megatron.data.kinds.curriculum.lengths import GrowingLengths
from megatron.data.kinds.curriculum.order import draw_samples
from megatron.data.pipeline import BatchSizes, DataKind, DataPipeline
from megatron.data.samples import SampleDataset


class Curriculum(DataKind):
    """See :class:`DataKind`."""

    def order(
        self,
        data: DataPipeline,
        train: SampleDataset[Any],
        num_samples: int,
        batch_sizes: BatchSizes,
    ) -> SampleDataset[Any]:
        """See :meth:`DataKind.order`."""
        sampling = data_sampling(data.config.kind(CurriculumConfig))
        if sampling is None:
            return train
        blend = data.parts.train
        cache = IndexCache(None) if blend is None else data.cache(blend.sources[0].paths[0])
        return draw_samples(train, sampling, batch_sizes(), num_samples, cache)

    def lengths(self, config: RunConfig, samples: Callable[[int], int]) -> GrowingLengths | None:
        """See :meth:`DataKind.lengths`.

        Raises:
            ConfigError: a length exceeds ``--seq-length``, or does not fit the layout.
        """
        growth = sequence_lengths(config.kind(CurriculumConfig))
        if growth is None:
            return None
        lengths = GrowingLengths(config.model.seq_length, growth, samples)
        lengths.check(config.parallel, growth.name)
        return lengths


KIND = Curriculum()
