"""Curricula: sequences that grow longer, and samples drawn by their difficulty."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import ConfigError, ParallelConfig, RunConfig
from megatron.data.index_cache import IndexCache
from megatron.data.pipeline import BatchSizes, DataKind, DataPipeline, SequenceLengths
from megatron.data.samples import SampleDataset
from megatron.features.curriculum.flags import (
    FOLDING_METRIC,
    LENGTH_MULTIPLE,
    CurriculumConfig,
    data_sampling,
    sequence_lengths,
)
from megatron.features.curriculum.order import draw_samples, stages


class Curriculum(DataKind):
    """Orders the training samples by difficulty, and cuts them to a growing length."""

    def order(
        self,
        data: DataPipeline,
        train: SampleDataset[Any],
        num_samples: int,
        batch_sizes: BatchSizes,
    ) -> SampleDataset[Any]:
        sampling = data_sampling(data.config.section(CurriculumConfig))
        if sampling is None:
            return train
        blend = data.parts.train
        cache = IndexCache(None) if blend is None else data.cache(blend.sources[0].paths[0])
        return draw_samples(train, sampling, batch_sizes(), num_samples, cache)

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> Callable[[Sequence[Any]], Any]:
        """Batches of samples drawn by difficulty have no columns of padding alone; in a pipeline
        they have, since the micro batches of a step must have one shape."""
        sampling = data_sampling(data.config.section(CurriculumConfig))
        parallel = data.config.parallel
        if sampling is None or sampling.lengths or parallel.pipeline_model_parallel_size > 1:
            return collate
        return WithoutPadding(collate, math.lcm(LENGTH_MULTIPLE, _split_over(parallel)))

    def lengths(self, config: RunConfig, samples: Callable[[int], int]) -> SequenceLengths | None:
        """Step i has the length of step i + 1 of DeepSpeed's schedule, which counts from 1."""
        schedule = sequence_lengths(config.section(CurriculumConfig))
        if schedule is None:
            return None
        seq_length = config.model.seq_length
        growth = [(step - 1, length) for step, length in stages(schedule)]
        lengths = [length for _, length in growth]
        _check_lengths(lengths, seq_length, config.parallel, schedule.name)
        for part in config.model.parts:
            part.check_lengths(lengths, schedule.name)
        folds = None
        if schedule.name.endswith(FOLDING_METRIC):
            if config.parallel.pipeline_model_parallel_size > 1:
                raise ConfigError(
                    f"{schedule.name} changes the number of rows of a micro batch, which the "
                    "stages of --pipeline-model-parallel-size "
                    f"{config.parallel.pipeline_model_parallel_size} exchange: use seqlen_truncate"
                )
            folds = config.training.micro_batch_size
        return SequenceLengths(seq_length, growth, samples, folds)


KIND = Curriculum()


@dataclass(frozen=True)
class WithoutPadding:
    """Collates samples into a batch as long as its longest sample, in a multiple of ``multiple``,
    if its type has padding that can be left out."""

    collate: Callable[[Sequence[Any]], Any]
    multiple: int

    def __call__(self, samples: Sequence[Any]) -> Any:
        batch = self.collate(samples)
        return batch.without_padding(self.multiple) if hasattr(batch, "without_padding") else batch


def _check_lengths(
    lengths: Sequence[int], seq_length: int, parallel: ParallelConfig, schedule_name: str
) -> None:
    """Refuses sequence lengths that do not fit the samples or the layout. Raises ConfigError if one
    exceeds ``--seq-length``, or is not divisible by the ranks."""
    if max(lengths) > seq_length:
        raise ConfigError(
            f"{schedule_name} grows to sequences of {max(lengths)} tokens, more than the samples "
            f"have: --seq-length {seq_length}"
        )
    ranks = _split_over(parallel)
    for length in lengths:
        if length % ranks:
            raise ConfigError(
                f"{schedule_name} has sequences of {length} tokens, which --sequence-parallel "
                f"splits over --tensor-model-parallel-size {ranks}: make difficulty_step and all "
                f"difficulties multiples of {ranks}"
            )


def _split_over(parallel: ParallelConfig) -> int:
    """Ranks that a sequence is split over."""
    return parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
