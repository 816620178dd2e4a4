"""The data of a run: its family's samples, in the order in which it consumes them."""

from __future__ import annotations

from itertools import groupby

from megatron.config.curriculum import data_sampling
from megatron.data.build import Datasets
from megatron.data.curriculum.drawn import draw_samples
from megatron.data.index_cache import IndexCache
from megatron.data.run_data import RunData, parts_of
from megatron.data.skip import SkippedSamples, parse_skipped
from megatron.families import family_of
from megatron.training.plan import TrainingPlan
from megatron.training.run import Run
from megatron.training.trainer import TrainingData


def run_data(run: Run) -> TrainingData:
    """Datasets of all parts, and what makes batches of their samples.

    Raises:
        ValueError, OSError: data that cannot be used; the message names flag and file.
    """
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    return TrainingData(run_datasets(data, TrainingPlan(run.config)), data.collator())


def run_datasets(data: RunData, plan: TrainingPlan) -> Datasets:
    """The samples of training, validation and test; those of training in the order of the run: a
    curriculum, and what is skipped.

    Raises:
        ValueError, OSError: data that cannot be used; the message names flag and file.
    """
    found = data.datasets(plan.sample_counts)
    if found.train is None:
        return found
    train, skipped = found.train, parse_skipped(data.config.data.skip_samples)
    sampling = data_sampling(data.config.curriculum)
    if sampling is not None:
        wanted = plan.sample_counts[0] + sum(map(len, skipped))
        train = draw_samples(train, sampling, batches(plan), wanted, _order_cache(data))
    return found._replace(train=SkippedSamples(train, skipped) if skipped else train)


def _order_cache(data: RunData) -> IndexCache:
    """Where the order of a curriculum is kept."""
    train = parts_of(data.config).train
    return IndexCache(None) if train is None else data.cache(train.sources[0].paths[0])


def batches(plan: TrainingPlan) -> list[tuple[int, int]]:
    """The batch sizes of a run in turn: (size, number of steps)."""
    sizes, consumed = [], 0
    for _ in range(max(1, plan.train_iters)):
        sizes.append(plan.batch_size.batch_size(consumed))
        consumed += sizes[-1]
    return [(size, len(list(steps))) for size, steps in groupby(sizes)]
