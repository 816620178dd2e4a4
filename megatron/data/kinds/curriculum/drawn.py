"""A dataset whose samples come in the order of a curriculum."""

from __future__ import annotations

import dataclasses
import json
import logging
import operator
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megatron.config.kinds.curriculum import DataSampling, Metric
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.kinds.curriculum.metric_files import Rows, read_rows
from megatron.data.kinds.curriculum.order import MetricIndex, sample_order
from megatron.data.samples import Piece, SampleDataset
from megatron.util.digests import digest, digest_of_parts

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")
ORDER_VERSION = 1
"""Part of the cache entry's name: raise it when the order changes."""
ANALYSED = "dataset.json"
"""File beside those of a metric that says which samples were analysed."""
_PROBES = 32


class DrawnSamples(Generic[Sample]):
    """Samples of a dataset in another order, some of them several times.

    Args:
        dataset: the samples.
        index: its array ``order`` holds the number of the sample to read as the i-th.
    """

    def __init__(self, dataset: SampleDataset[Sample], index: StoredArrays) -> None:
        self.dataset = dataset
        self._index = index

    def __len__(self) -> int:
        return len(self._index["order"])

    def __getitem__(self, index: int, /) -> Sample:
        return self.dataset[self.drawn(index)]

    def origin(self, index: int, /) -> Sequence[Piece]:
        """Where sample `index` comes from."""
        return self.dataset.origin(self.drawn(index))

    def drawn(self, index: int) -> int:
        """The number that sample `index` has in the dataset that it is drawn from."""
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a curriculum of {len(self)} samples")
        return int(self._index["order"][index])


def draw_samples(
    dataset: SampleDataset[Sample],
    sampling: DataSampling,
    batches: Sequence[tuple[int, int]],
    num_samples: int,
    cache: IndexCache,
) -> DrawnSamples[Sample]:
    """The samples that a run consumes, drawn by their difficulty.

    Args:
        dataset: the samples to draw from; those that were analysed.
        batches: the batch sizes of the run's steps in turn, (size, number of steps); the last one
            goes on.
        num_samples: how many the run may consume.
        cache: where the order is kept.

    Raises:
        FileNotFoundError, ValueError: files of a metric are missing, damaged, or of other samples;
            or no sample is easy enough for the first step.
    """
    available = sampling.num_epochs * len(dataset)
    if num_samples > available:
        raise ValueError(
            f"data_efficiency.data_sampling.num_epochs {sampling.num_epochs} allows {available} "
            f"samples, {len(dataset)} an epoch; the run takes {num_samples}"
        )
    indices = {metric.name: _read_metric(metric, dataset) for metric in sampling.metrics}
    depends_on = {
        "version": ORDER_VERSION,
        "seed": sampling.seed,
        "metrics": [_identity(metric, indices[metric.name]) for metric in sampling.metrics],
        "dataset samples": len(dataset),
        "batches": [list(pair) for pair in batches],
        "samples": num_samples,
    }

    def build() -> dict[str, np.ndarray]:
        sizes = _each(batches)
        return {"order": sample_order(sampling, indices, len(dataset), sizes, num_samples)}

    return DrawnSamples(dataset, cache.arrays("curriculum-train", depends_on, build))


def fingerprint(dataset: SampleDataset[Any]) -> str:
    """Identifies a dataset by its number of samples and by some of them, evenly spaced."""
    count = len(dataset)
    probes = min(count, _PROBES)
    samples = (dataset[probe * (count - 1) // max(probes - 1, 1)] for probe in range(probes))
    parts = (part for s in samples for part in (s if isinstance(s, tuple) else (s,)))
    return digest_of_parts(chain((str(count),), (np.asarray(p).tobytes() for p in parts)))


def _each(batches: Sequence[tuple[int, int]]) -> Iterator[int]:
    runs = chain.from_iterable(repeat(size, count) for size, count in batches)
    return chain(runs, repeat(batches[-1][0]))


def _read_metric(metric: Metric, dataset: SampleDataset[Any]) -> MetricIndex:
    where = f"data_efficiency: the metric {metric.name}"
    try:
        samples = read_rows(metric.index_to_sample_path)
        values = metric.index_to_metric_path
        rows = None if values is None else read_rows(values)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from None
    if rows is not None and (len(rows) != len(samples) or len(rows.values) != len(rows)):
        raise ValueError(
            f"{where}: {metric.index_to_metric_path} has {len(rows)} rows of {len(rows.values)} "
            f"values together, {metric.index_to_sample_path} {len(samples)} rows; there must be "
            "one value for each row: take both from one analysis"
        )
    _check_samples(metric, samples, dataset, where)
    return MetricIndex(samples, None if rows is None else rows.values)


def _check_samples(metric: Metric, samples: Rows, dataset: SampleDataset[Any], where: str) -> None:
    """Refuses an analysis of other samples than these."""
    path, count = metric.index_to_sample_path, len(dataset)
    highest = int(samples.values.max()) if len(samples.values) else 0
    if highest >= count:
        raise ValueError(
            f"{where}: {path} names sample {highest} of a dataset of {count}: {_AGAIN}"
        )
    analysed = Path(path).parent / ANALYSED
    if analysed.is_file():
        try:
            known = json.loads(analysed.read_text())["fingerprint"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{analysed} is damaged: {_AGAIN}") from None
        if known != fingerprint(dataset):
            raise ValueError(f"{where}: {path} was made of other samples: {_AGAIN}")
    elif len(samples.values) != count:
        logger.warning(
            "%s: %s names %d samples, the dataset has %d: those left out are never drawn",
            where, path, len(samples.values), count,
        )  # fmt: skip


_AGAIN = (
    "run tools/analyze_data.py with the flags of this run (data, --split, --seq-length, --seed, "
    "and its length)"
)


def _identity(metric: Metric, index: MetricIndex) -> dict[str, Any]:
    """All that the order depends on; where the files lie is no part of it."""
    samples = (np.ascontiguousarray(a).data for a in (index.samples.ends, index.samples.values))
    values = None if index.values is None else index.values.tolist()
    schedule = dataclasses.asdict(metric.schedule)
    del schedule["name"]
    return {
        "name": metric.name,
        "percentile": metric.percentile,
        "schedule": schedule,
        "samples": digest_of_parts(samples),
        "values": digest(repr(values)),
    }
