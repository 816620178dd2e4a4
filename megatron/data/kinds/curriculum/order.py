"""The order of samples that are drawn by their difficulty: that of DeepSpeed's sampler.

Samples lie in clusters. When a difficulty grows, those that it lets in form another cluster,
shuffled. A step draws, for each sample of its batch, a cluster by size, and takes as many samples
of every cluster as fell to it, in the cluster's order from where the last step stopped; a cluster
that is used up is shuffled again. The batch is shuffled in the end. All of it comes from one random
number generator, so that a run's order is a function of the seed, the metrics, their schedules and
the batch sizes alone, and is the one that DeepSpeed 0.19's ``DeepSpeedDataSampler`` draws. (It is
not where a step wants more of a cluster than is in it: DeepSpeed's batch is then too short.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.config.kinds.curriculum import DataSampling, Metric
from megatron.data.kinds.curriculum.metric_files import Rows
from megatron.data.kinds.curriculum.schedule import difficulty

_Samples = npt.NDArray[np.integer]


@dataclass(frozen=True)
class MetricIndex:
    """What the files of a metric say.

    Attributes:
        samples: the samples of each value.
        values: the values, one for each row of ``samples``; None with percentiles.
    """

    samples: Rows
    values: npt.NDArray[np.integer] | None


@dataclass
class _Cluster:
    samples: _Samples
    position: int = 0

    def take(self, count: int, rng: np.random.Generator) -> _Samples:
        """The next samples; the cluster is shuffled whenever its end is reached."""
        found: list[_Samples] = []
        while True:
            stop = min(self.position + count, len(self.samples))
            taken = self.samples[self.position : stop]
            self.position, count = stop, count - len(taken)
            if not count:
                return np.concatenate([*found, taken])
            found.append(taken.copy())
            rng.shuffle(self.samples)
            self.position = 0


def sample_order(
    sampling: DataSampling,
    indices: Mapping[str, MetricIndex],
    dataset_samples: int,
    batch_sizes: Iterable[int],
    num_samples: int,
) -> _Samples:
    """The samples in the order in which a run consumes them.

    Args:
        indices: by the metric's name.
        dataset_samples: samples that there are.
        batch_sizes: of each step in turn; as many are taken as are needed.
        num_samples: how many samples are wanted.

    Returns:
        Sample numbers, uint32[num_samples] (int64 from 2**32 samples).

    Raises:
        ValueError: no sample is easy enough for the first step.
    """
    rng = np.random.default_rng(sampling.seed)
    clusters: list[_Cluster] = []
    current: dict[str, int] = {}
    dtype = np.dtype("u4" if dataset_samples < 1 << 32 else "i8")
    order: _Samples = np.empty(num_samples, dtype)
    drawn = 0
    for step, batch_size in enumerate(batch_sizes, start=1):
        if drawn >= num_samples:
            break
        wanted = {metric.name: difficulty(metric.schedule, step) for metric in sampling.metrics}
        if step == 1 or wanted != current:
            samples = _new_samples(sampling, indices, dataset_samples, current, wanted, clusters)
            if len(samples):
                rng.shuffle(samples)
                clusters.append(_Cluster(samples))
        current = wanted
        if not clusters:
            raise ValueError(_too_easy(sampling, indices, current))
        # The last batch may be more than is wanted.
        order[drawn : drawn + batch_size] = _batch(clusters, batch_size, rng)[: num_samples - drawn]
        drawn += batch_size
    assert drawn >= num_samples
    return order


def _batch(clusters: list[_Cluster], batch_size: int, rng: np.random.Generator) -> _Samples:
    sizes = [len(cluster.samples) for cluster in clusters]
    total = sum(sizes)
    shares = [size / total for size in sizes]
    draws = rng.choice(len(clusters), batch_size, replace=True, p=shares)
    counts = np.bincount(draws, minlength=len(clusters)).tolist()
    pairs = zip(clusters, counts, strict=True)
    batch = np.concatenate([cluster.take(count, rng) for cluster, count in pairs if count])
    rng.shuffle(batch)
    return batch


def _new_samples(
    sampling: DataSampling,
    indices: Mapping[str, MetricIndex],
    dataset_samples: int,
    before: Mapping[str, int],
    wanted: Mapping[str, int],
    clusters: list[_Cluster],
) -> npt.NDArray[np.int64]:
    """Samples that become easy enough: of one metric in the order of its file, of several in their
    own order."""
    if not sampling.metrics:
        return np.arange(0 if clusters else dataset_samples)
    if len(sampling.metrics) == 1:
        (metric,) = sampling.metrics
        reached = before.get(metric.name)
        return _between(metric, indices[metric.name], reached, wanted[metric.name])
    within = np.ones(dataset_samples, bool)
    for metric in sampling.metrics:
        easy = np.zeros(dataset_samples, bool)
        easy[_between(metric, indices[metric.name], None, wanted[metric.name])] = True
        within &= easy
    for cluster in clusters:
        within[cluster.samples] = False
    return np.flatnonzero(within)


def _between(
    metric: Metric, index: MetricIndex, above: int | None, up_to: int
) -> npt.NDArray[np.int64]:
    """Samples whose difficulty is in (above, up_to], all up to there without ``above``."""
    samples = index.samples
    if metric.percentile:
        # DeepSpeed counts samples, so that one value may be cut in two.
        whole, highest = len(samples.values), metric.schedule.highest
        start = whole // highest * (above or 0)
        stop = whole if up_to == highest else whole // highest * up_to
        return samples.values[start:stop].astype(np.int64)
    assert index.values is not None
    chosen = index.values <= up_to
    if above is not None:
        chosen &= index.values > above
    rows = [samples[int(row)] for row in np.flatnonzero(chosen)]
    return np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)


def _too_easy(
    sampling: DataSampling, indices: Mapping[str, MetricIndex], wanted: Mapping[str, int]
) -> str:
    limits, found = [], []
    for metric in sampling.metrics:
        name, limit, index = metric.name, wanted[metric.name], indices[metric.name]
        if metric.percentile:
            count, highest = len(index.samples.values), metric.schedule.highest
            limits.append(f"a {name} in the first {limit} of {highest} parts")
            found.append(f"{count} samples make {count // highest} a part")
        else:
            limits.append(f"a {name} of at most {limit}")
            lowest = min(index.values.tolist(), default=None) if index.values is not None else None
            found.append(f"the lowest {name} is {lowest}")
    return (
        f"data_efficiency: no sample has {' and '.join(limits)} ({', '.join(found)}), so there is "
        "nothing for the first step: raise min_difficulty"
    )
