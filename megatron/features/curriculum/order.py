"""Difficulty of each step, and the order of samples drawn by difficulty, as in DeepSpeed 0.19.

Samples are in clusters. When a difficulty grows, the samples that become available are shuffled and
form another cluster. For each sample of its batch, a step draws a cluster with a probability
proportional to the cluster's size. It then takes the drawn number of samples from each cluster,
starting where the last step stopped. A cluster is shuffled again when all its samples are used.
Finally the batch is shuffled.

All draws come from one random number generator, so that a run's order depends only on the seed, the
metrics, their schedules and the batch sizes. The order equals that of ``DeepSpeedDataSampler``,
unless a step needs more samples of a cluster than it contains: DeepSpeed's batch is then too short.
The schedules have the formulas of ``CurriculumScheduler``, described by Li et al. 2021
(arXiv:2108.06084, section 4).
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, ParallelConfig, RunConfig
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.pipeline import BatchSizes, DataKind, DataPipeline
from megatron.data.samples import (
    RenumberedSamples,
    SampleDataset,
    SampleView,
    SequenceLengths,
    checked_index,
)
from megatron.features.curriculum.analysis import ANALYSED, fingerprint
from megatron.features.curriculum.flags import (
    FOLDING_METRIC,
    LENGTH_MULTIPLE,
    CurriculumConfig,
    DataSampling,
    DifficultySchedule,
    Metric,
    data_sampling,
    sequence_lengths,
)
from megatron.features.curriculum.lengths import GrowingLengths
from megatron.features.curriculum.metric_files import MetricRows, read_rows
from megatron.features.curriculum.packing.data import Bin, BinCollator, PackedLengths, needed, pack
from megatron.features.curriculum.packing.section import SamplePacking, packing_of
from megatron.util.digests import digest, digest_of_parts
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")
_Samples = npt.NDArray[np.integer]
ORDER_VERSION = 1
"""Version of the order, part of each cache key. Increment it whenever the order changes."""
_AGAIN = (
    "run tools/analyze_data.py with the flags of this run (data, --split, --seq-length, --seed, "
    "and its length)"
)


def difficulty(schedule: DifficultySchedule, step: int) -> int:
    """Return the difficulty of a step, counted from 1."""
    assert step >= 1, step
    if schedule.kind == "fixed_discrete":
        return schedule.difficulties[bisect.bisect_left(schedule.last_steps, step)]
    share = (float(step) / schedule.steps) ** (1.0 / schedule.root)
    grown = math.floor(share * (schedule.highest - schedule.lowest) + schedule.lowest)
    grown -= grown % schedule.increment
    first = -(-schedule.lowest // schedule.increment) * schedule.increment
    return min(max(grown, first), schedule.highest)


def stages(schedule: DifficultySchedule) -> Iterator[tuple[int, int]]:
    """Yield (step, difficulty) for each step at which the difficulty changes, counted from 1."""
    last = max((schedule.steps, *schedule.last_steps)) + 1
    return changes(partial(difficulty, schedule), 1, last)


def changes(value: Callable[[int], int], step: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield (step, value) for ``step`` and for each later step at which the value changes. The
    value must never decrease, and must be constant from step ``last`` on."""
    while True:
        current = value(step)
        yield step, current
        if current == value(last):
            return
        step += bisect.bisect_right(range(step, last), current, key=value)


class DrawnSamples(RenumberedSamples[Sample]):
    """Samples of a dataset in another order, possibly repeated. The array ``order`` of the index
    has the sample number for each position."""

    def __init__(self, dataset: SampleDataset[Sample], index: StoredArrays) -> None:
        super().__init__(dataset)
        self._index = index

    def __len__(self) -> int:
        return len(self._index["order"])

    def number(self, index: int) -> int:
        return int(self._index["order"][checked_index(index, len(self))])


class MetricIndex(NamedTuple):
    samples: MetricRows
    """Samples with each value."""
    values: npt.NDArray[np.integer] | None
    """Value of each row of ``samples``; None with percentiles."""


def draw_samples(
    dataset: SampleDataset[Sample],
    sampling: DataSampling,
    batches: Sequence[tuple[int, int]],
    num_samples: int,
    cache: IndexCache,
) -> DrawnSamples[Sample]:
    """Return the `num_samples` samples that a run may consume, drawn by difficulty.

    `batches` are pairs (batch size, number of consecutive steps); the last size also applies to all
    further steps. Raises FileNotFoundError or ValueError if a metric's files are missing, damaged
    or made of other samples, or if no sample is easy enough for the first step.
    """
    available = sampling.num_epochs * len(dataset)
    if num_samples > available:
        raise ValueError(
            f"data_efficiency.data_sampling.num_epochs {sampling.num_epochs} allows {available} "
            f"samples, {len(dataset)} an epoch; the run needs {num_samples}"
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
        runs = chain.from_iterable(repeat(size, count) for size, count in batches)
        sizes: Iterator[int] = chain(runs, repeat(batches[-1][0]))
        return {"order": sample_order(sampling, indices, len(dataset), sizes, num_samples)}

    return DrawnSamples(dataset, cache.arrays("curriculum-train", depends_on, build))


def sample_order(
    sampling: DataSampling,
    indices: Mapping[str, MetricIndex],
    dataset_samples: int,
    batch_sizes: Iterable[int],
    num_samples: int,
) -> _Samples:
    """Return the numbers of samples in the order in which a run consumes them, uint32
    [num_samples], or int64 for a dataset of 2**32 samples or more. `batch_sizes` yields the batch
    size of each step, and is only read as far as needed. Raises ValueError if no sample is easy
    enough for the first step."""
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
            raise ValueError(_too_hard(sampling, indices, current))
        # The last batch may exceed the number of samples that remain.
        order[drawn : drawn + batch_size] = _batch(clusters, batch_size, rng)[: num_samples - drawn]
        drawn += batch_size
    assert drawn >= num_samples
    return order


@dataclass
class _Cluster:
    samples: _Samples
    position: int = 0

    def take(self, count: int, rng: np.random.Generator) -> _Samples:
        """Return the next samples. Shuffle the cluster whenever its end is reached."""
        blocks: list[_Samples] = []
        while True:
            stop = min(self.position + count, len(self.samples))
            taken = self.samples[self.position : stop]
            self.position, count = stop, count - len(taken)
            if not count:
                return np.concatenate([*blocks, taken])
            blocks.append(taken.copy())
            rng.shuffle(self.samples)
            self.position = 0


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
    """Return the samples that become easy enough in this step: with one metric in the order of its
    file, with several in ascending order."""
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
    """Return the samples with a difficulty in (above, up_to]; without a lower bound if None."""
    samples = index.samples
    if metric.percentile:
        # As in DeepSpeed, percentiles are shares of the samples, and can separate equal values.
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


def _too_hard(
    sampling: DataSampling, indices: Mapping[str, MetricIndex], wanted: Mapping[str, int]
) -> str:
    limits, reasons = [], []
    for metric in sampling.metrics:
        name, limit, index = metric.name, wanted[metric.name], indices[metric.name]
        if metric.percentile:
            count, highest = len(index.samples.values), metric.schedule.highest
            limits.append(f"a {name} in the first {limit} of {highest} parts")
            reasons.append(f"{count} samples make {count // highest} a part")
        else:
            limits.append(f"a {name} of at most {limit}")
            lowest = min(index.values.tolist(), default=None) if index.values is not None else None
            reasons.append(f"the lowest {name} is {lowest}")
    return (
        f"data_efficiency: no sample has {' and '.join(limits)} ({', '.join(reasons)}), so there "
        "is nothing for the first step: raise min_difficulty"
    )


def _read_metric(metric: Metric, dataset: SampleDataset[Any]) -> MetricIndex:
    """Read the files of a metric. Raises FileNotFoundError or ValueError if they are missing,
    damaged or made of other samples."""
    where, count = f"data_efficiency: the metric {metric.name}", len(dataset)
    path, values_path = metric.index_to_sample_path, metric.index_to_metric_path
    try:
        samples = read_rows(path)
        rows = None if values_path is None else read_rows(values_path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from None
    if rows is not None and (len(rows) != len(samples) or len(rows.values) != len(rows)):
        raise ValueError(
            f"{where}: {values_path} has {len(rows)} rows of {len(rows.values)} values together, "
            f"{path} {len(samples)} rows; there must be one value for each row: use two files of "
            "one analysis"
        )
    highest = int(samples.values.max()) if len(samples.values) else 0
    if highest >= count:
        raise ValueError(
            f"{where}: {path} names sample {highest} of a dataset of {count}: {_AGAIN}"
        )
    analysed = Path(path).parent / ANALYSED
    if analysed.is_file():
        try:
            known = parse_json(analysed.read_bytes(), str(analysed), lenient=True)["fingerprint"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{analysed} is damaged: {_AGAIN}") from None
        if known != fingerprint(dataset):
            raise ValueError(f"{where}: {path} was made of other samples: {_AGAIN}")
    elif len(samples.values) != count:
        logger.warning(
            "%s: %s names %d samples, the dataset has %d: those left out are never drawn",
            where, path, len(samples.values), count,
        )  # fmt: skip
    return MetricIndex(samples, None if rows is None else rows.values)


def _identity(metric: Metric, index: MetricIndex) -> dict[str, Any]:
    """Return everything that determines the order, which excludes the paths of the files."""
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


class Curriculum(DataKind):
    """Data kind with training samples in order of difficulty, truncated to a growing length."""

    def weighs(self, config: RunConfig) -> bool:
        return _packing(config) is not None

    def needed(self, config: RunConfig, num_samples: int) -> int:
        packing = _packing(config)
        return (
            num_samples
            if packing is None
            else needed(packing, config.model.seq_length, num_samples)
        )

    def views(self, data: DataPipeline, sample: Any) -> list[SampleView] | None:
        if not isinstance(sample, Bin):
            return None
        views = (data.views(each, data.seq_length) for each in sample.samples)
        return [view for of_sample in views for view in of_sample]

    def order(
        self,
        data: DataPipeline,
        train: SampleDataset[Any],
        num_samples: int,
        batch_sizes: BatchSizes,
    ) -> SampleDataset[Any]:
        sampling, packing = (
            data_sampling(data.config.section(CurriculumConfig)),
            _packing(data.config),
        )
        if sampling is None and packing is None:
            return train
        blend = None if data.config.data.mock_data else data.parts.train
        cache = IndexCache(None) if blend is None else data.cache(blend.sources[0].paths[0])
        if packing is not None:
            size = data.config.training.global_batch_size
            return pack(train, packing, size, num_samples, cache)
        assert sampling is not None
        return draw_samples(train, sampling, batch_sizes(), num_samples, cache)

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> Callable[[Sequence[Any]], Any]:
        """Return a collator that removes columns of padding from batches drawn by difficulty. In a
        pipeline padding remains, because all micro batches of a step must have the same shape."""
        sampling = data_sampling(data.config.section(CurriculumConfig))
        parallel = data.config.parallel
        multiple = math.lcm(LENGTH_MULTIPLE, parallel.length_divisor)
        if _packing(data.config) is not None:
            pipelined = parallel.pipeline_model_parallel_size > 1
            return BinCollator(collate, None if pipelined else multiple)
        if sampling is None or sampling.lengths or parallel.pipeline_model_parallel_size > 1:
            return collate
        return WithoutPadding(collate, multiple)

    def lengths(
        self, config: RunConfig, lengths: SequenceLengths, samples: Callable[[int], int]
    ) -> SequenceLengths:
        """Return the sequence lengths of a run. DeepSpeed counts steps from 1, so step i, counted
        from 0, has the length of its step i + 1."""
        schedule = sequence_lengths(config.section(CurriculumConfig))
        if schedule is None:
            return lengths if _packing(config) is None else PackedLengths(lengths.seq_length)
        seq_length = config.model.seq_length
        growth = [(step - 1, length) for step, length in stages(schedule)]
        grown = [length for _, length in growth]
        _check_lengths(grown, seq_length, config.parallel, schedule.name)
        for part in config.model.parts:
            part.check_lengths(grown, schedule.name)
        folds = None
        if schedule.name.endswith(FOLDING_METRIC):
            if config.parallel.pipeline_model_parallel_size > 1:
                raise ConfigError(
                    f"{schedule.name} changes the number of rows of a micro batch, which the "
                    "stages of --pipeline-model-parallel-size "
                    f"{config.parallel.pipeline_model_parallel_size} exchange: use seqlen_truncate"
                )
            folds = config.training.micro_batch_size
        return GrowingLengths(seq_length, growth, samples, folds)


KIND = Curriculum()


def _packing(config: RunConfig) -> SamplePacking | None:
    pipelined = config.parallel.pipeline_model_parallel_size > 1
    return packing_of(config.section(CurriculumConfig), equal=pipelined)


@dataclass(frozen=True)
class WithoutPadding:
    """Collator that removes padding if this type of batch allows it. Batches are as long as their
    longest sample, rounded up to ``multiple``."""

    collate: Callable[[Sequence[Any]], Any]
    multiple: int

    def __call__(self, samples: Sequence[Any]) -> Any:
        batch = self.collate(samples)
        return batch.without_padding(self.multiple) if hasattr(batch, "without_padding") else batch


def _check_lengths(
    lengths: Sequence[int], seq_length: int, parallel: ParallelConfig, schedule_name: str
) -> None:
    """Raise ConfigError if a sequence length exceeds ``--seq-length``, or is not divisible as the
    layout requires."""
    if max(lengths) > seq_length:
        raise ConfigError(
            f"{schedule_name} grows to sequences of {max(lengths)} tokens, more than the samples "
            f"have: --seq-length {seq_length}"
        )
    divisor, context = parallel.length_divisor, parallel.context_parallel_size
    split = [
        "--sequence-parallel splits over --tensor-model-parallel-size "
        f"{parallel.tensor_model_parallel_size}"
    ] * parallel.sequence_parallel
    split += [f"--context-parallel-size {context} cuts into {2 * context} pieces"] * (context > 1)
    for length in lengths:
        if length % divisor:
            raise ConfigError(
                f"{schedule_name} has sequences of {length} tokens, which {' and '.join(split)}: "
                f"make difficulty_step and all difficulties multiples of {divisor}"
            )
