"""The curriculum of a run's training samples."""

from __future__ import annotations

from itertools import groupby
from typing import TypeVar

from megatron.config import RunConfig
from megatron.config.curriculum import data_sampling
from megatron.data.curriculum.drawn import draw_samples
from megatron.data.index_cache import IndexCache
from megatron.data.samples import SampleDataset
from megatron.training.plan import TrainingPlan

Sample = TypeVar("Sample")


def curriculum_samples(
    dataset: SampleDataset[Sample],
    config: RunConfig,
    plan: TrainingPlan,
    cache: IndexCache,
    num_samples: int | None = None,
) -> SampleDataset[Sample]:
    """Training samples in the order of the curriculum, if the run has one.

    Args:
        dataset: training samples in their usual order.
        cache: where the new order is kept.
        num_samples: how many the run may ask for, those that it skips included; by default what it
            trains on.

    Raises:
        FileNotFoundError, ValueError: the files of a metric cannot be used.
    """
    sampling = data_sampling(config.curriculum)
    if sampling is None:
        return dataset
    wanted = plan.sample_counts[0] if num_samples is None else num_samples
    return draw_samples(dataset, sampling, batches(plan), wanted, cache)


def batches(plan: TrainingPlan) -> list[tuple[int, int]]:
    """The batch sizes of a run in turn: (size, number of steps)."""
    sizes, consumed = [], 0
    for _ in range(max(1, plan.train_iters)):
        sizes.append(plan.batch_size.batch_size(consumed))
        consumed += sizes[-1]
    return [(size, len(list(steps))) for size, steps in groupby(sizes)]
