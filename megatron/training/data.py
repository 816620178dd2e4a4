"""The datasets of a run, training samples in the order in which they are consumed."""

from __future__ import annotations

from megatron.data.build import Datasets
from megatron.data.index_cache import IndexCache
from megatron.data.run_data import RunData, parts_of
from megatron.training.plan import TrainingPlan
from megatron.training.run_order import in_run_order


def run_datasets(data: RunData, plan: TrainingPlan) -> Datasets:
    """The samples of training, validation and test.

    Raises:
        ValueError, OSError: data that cannot be used; the message names flag and file.
    """
    found = data.datasets(plan.sample_counts)
    train = parts_of(data.config).train
    cache = IndexCache(None) if train is None else data.cache(train.sources[0].paths[0])
    return found._replace(train=in_run_order(found.train, data.config, plan, cache))
