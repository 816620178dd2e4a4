"""How long a fine-tuning is, and what it is evaluated on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron.data.build import Datasets
from megatron.data.loader import TrainingData
from megatron.data.samples import RenumberedSamples, SampleDataset, checked_index
from megatron.families import family_of
from megatron.run.run import Run
from megatron.training.plan import Epochs, TrainingPlan

_SAY_ORDERS = (
    "megatron.features.instruction.packing",
    "megatron.features.preference.samples",
)
"""Loggers."""


class ExampleCounts(NamedTuple):
    """Samples of an epoch: of each path of the training data, and of each held-out set."""

    train: tuple[int, ...]
    valid: dict[str, int]


def count_samples(run: Run) -> ExampleCounts:
    """Tokenizes the examples of a run, or takes them from the cache, and counts the samples that
    they make. Raises ValueError or OSError, naming flag and file, if data cannot be used."""
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    with _orders_unsaid():
        found = data.datasets((1, 1, 0))
    assert found.train is not None
    parts = getattr(found.train, "parts", (found.train,))
    return ExampleCounts(
        tuple(map(len, parts)),
        {name: _whole(samples) for name, samples in found.valid.items()},
    )


@contextmanager
def _orders_unsaid() -> Iterator[None]:
    """Keeps quiet about orders of samples, which are made again once their number is known."""
    loggers = [logging.getLogger(name) for name in _SAY_ORDERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _whole(samples: SampleDataset[Any]) -> int:
    return sum(map(len, getattr(samples, "parts", (samples,))))


class SameSamples(RenumberedSamples[Any]):
    """The first ``count`` samples of a data set in every evaluation, which reads ``each`` of them
    (filled up from the beginning), ``num_samples`` in all evaluations."""

    def __init__(
        self, dataset: SampleDataset[Any], count: int, each: int, num_samples: int
    ) -> None:
        super().__init__(dataset)
        self.count, self.each, self.num_samples = count, each, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def number(self, index: int) -> int:
        return checked_index(index, len(self)) % self.each % self.count


def training_data(run: Run, epochs: Epochs | None, held_out: dict[str, int]) -> TrainingData:
    """The data of the run, whose evaluations all read the same held-out samples, at most as many as
    ``held_out`` says."""
    plan = TrainingPlan(run.config, epochs)
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    train, valid, test = plan.sample_counts
    each = plan.eval_iters * plan.global_batch_size
    valid += each  # before the first step
    found = data.training_data((train, min(valid, each), test), plan.batch_sizes)
    same = {
        name: SameSamples(samples, held_out[name], each, valid)
        for name, samples in found.datasets.valid.items()
    }
    datasets = Datasets(found.datasets.train, same, found.datasets.test)
    return found._replace(datasets=datasets)
