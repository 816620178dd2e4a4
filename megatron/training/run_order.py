"""The order in which a run consumes its training samples: a curriculum, and what is skipped."""

from __future__ import annotations

from typing import TypeVar

from megatron.config import RunConfig
from megatron.config.curriculum import data_sampling
from megatron.data.index_cache import IndexCache
from megatron.data.samples import SampleDataset
from megatron.data.skip import SkippedSamples, parse_skipped
from megatron.training.curriculum import curriculum_samples
from megatron.training.plan import TrainingPlan

Sample = TypeVar("Sample")


def in_run_order(
    samples: SampleDataset[Sample] | None, config: RunConfig, plan: TrainingPlan, cache: IndexCache
) -> SampleDataset[Sample] | None:
    """Training samples by the number at which a run consumes them.

    Args:
        samples: the training samples in their usual order; None stays None.
        cache: where the order of a curriculum is kept.

    Raises:
        ValueError, OSError: what the flags name cannot be used; the message names it.
    """
    if samples is None:
        return None
    skipped = parse_skipped(config.data.skip_samples)
    sampling = data_sampling(config.curriculum)
    if sampling is not None:
        wanted = plan.sample_counts[0] + sum(map(len, skipped))
        samples = curriculum_samples(samples, config, plan, cache, wanted)
    return SkippedSamples(samples, skipped) if skipped else samples
