"""Difficulties of all samples of a dataset, in the files of DeepSpeed's data analyzer.

    NAME_sample_to_metric    row i: the value of sample i
    NAME_index_to_metric     row i: the i-th of the distinct values, in ascending order
    NAME_index_to_sample     row i: the samples with this value, in ascending order
    NAME_index_to_sample_percentile_merged    the same samples, with about 1 % of the values per row

``total_vocab_freq`` has one file, ``total_vocab_freq_metric_value``: the number of occurrences of
each token.

An analysis has two steps. In the map step each worker reads its share of the samples, divided over
threads, and writes their values to ``NAME/worker<W>_thread<T>``. The reduce step merges these
files. It reads them in blocks, so that its memory depends on the number of distinct values and not
on the number of samples.

Shape suffixes: T tokens of a sample, V vocabulary, N samples.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, groupby, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.data.samples import PackedSample, SampleDataset
from megatron.features.curriculum.metric_files import (
    BLOCK,
    ValueBlock,
    appending_values,
    fitting_dtype,
    read_values,
    replacing_values,
    write_index,
    write_rows,
)
from megatron.util.digests import digest_of_parts
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json
from megatron.util.workers import map_in_order, usable_processors

VOCABULARY = "total_vocab_freq"
"""Metric that counts tokens, named as in Megatron-DeepSpeed."""
RARITIES = ("vocab_rarity", "seqlen_vocab_rarity")
"""Metrics that require the token counts of all samples."""
METRICS = (VOCABULARY, *RARITIES, "seqlen")
ANALYSED = "dataset.json"
"""File in a metric's folder with the identity of the analysed samples."""
_PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
SAMPLES_PER_PROCESS = 10_000
"""Minimum number of samples for each process."""
_BLOCKS_PER_THREAD = 4
_LARGEST_BLOCK = 20_000
_TEXTS_AT_ONCE = 256
_MERGED_ROWS = 100
_PROBES = 32

_Values = npt.NDArray[np.integer]
Item = TypeVar("Item")
Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]
"""Callback that gets the number of samples read so far and the total number."""


class MetricSummary(NamedTuple):
    """Summary of a metric: the folder, number and distribution of its values."""

    name: str
    folder: Path
    samples: int
    values: int
    """Number of distinct values. For the token counts, the number of distinct tokens that occur."""
    percentiles: dict[int, int]


class Rarity(NamedTuple):
    """Rarities of tokens, from :func:`token_rarity`."""

    of_tokens_V: npt.NDArray[np.float64]
    coefficient: int
    """Factor of the length in ``seqlen_vocab_rarity``. It exceeds the rarity of any sample."""


class Share(NamedTuple):
    """Samples that one thread of a worker reads."""

    worker: int
    thread: int
    numbers: range

    def folder(self, metric_folder: Path) -> Path:
        return metric_folder / f"worker{self.worker}_thread{self.thread}"


@dataclass(frozen=True)
class Analysis:
    """Computation of a dataset's metrics, with files in ``folder/NAME/``. ``vocab_size`` is that of
    the padded token embedding. Methods raise ValueError if a metric is unknown, if this type of
    sample has no metrics, or if files belong to other samples; FileNotFoundError if another step
    must run first; and ChildProcessError if a process was killed."""

    dataset: SampleDataset[Any]
    metrics: Sequence[str]
    folder: Path
    vocab_size: int
    seq_length: int
    workers: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ValueError(f"--analyzing-metric {name} must be one of {', '.join(METRICS)}")
        if not len(self.dataset):
            raise ValueError("the dataset has no samples")

    def shares(self, worker: int) -> list[Share]:
        """Return the shares of a worker's threads, divided as in DeepSpeed."""
        bounds = _divided(range(len(self.dataset)), self.workers)[worker]
        return [Share(worker, n, part) for n, part in enumerate(_divided(bounds, self.threads))]

    def map(
        self,
        worker: int = 0,
        only_threads: Sequence[int] = (),
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Write the values of a worker's samples. ``only_threads`` selects some of its threads."""
        shares = [s for s in self.shares(worker) if s.thread in only_threads or not only_threads]
        blocks = [(share, block) for share in shares for block in _blocks(share.numbers)]
        rarity = self.rarity() if self._of_rarity else None
        measure = partial(_measure, self.dataset, self.metrics, rarity, self.vocab_size)
        total, done = sum(len(share.numbers) for share in shares), 0
        processes = min(len(shares), total // SAMPLES_PER_PROCESS)
        answers = _in_processes(blocks, measure, processes)
        for share, parts in groupby(answers, key=lambda answer: answer[0][0]):
            with ExitStack() as files:
                add = {n: files.enter_context(self._writing(share, n)) for n in self.metrics}
                for (_, block), values in parts:
                    for name in self.metrics:
                        add[name](values[name])
                    done += len(block)
                    progress(done, total)

    def reduce(self, processes: int = 1) -> list[MetricSummary]:
        """Merge the files of all workers and threads."""
        shares = [share for worker in range(self.workers) for share in self.shares(worker)]
        return [self._reduce(name, shares, processes) for name in self.metrics]

    def _reduce(self, name: str, shares: Sequence[Share], processes: int) -> MetricSummary:
        folder = self.folder / name
        parts = self._parts(name, shares)
        values: _Values
        counts: _Values
        _disown(folder)
        if name == VOCABULARY:
            counts_V = np.zeros(self.vocab_size + 1, np.int64)
            for part in parts:
                counts_V += read_values(part).astype(np.int64)
            write_rows(folder / f"{name}_metric_value", counts_V, [len(counts_V)])
            values, counts = np.unique(counts_V[counts_V > 0], return_counts=True)
        else:
            values, counts = merge(folder / name, parts, processes)
        self._identify(folder, name)
        distinct = int(counts.sum()) if name == VOCABULARY else len(values)
        return MetricSummary(
            name, folder, len(self.dataset), distinct, _percentiles(values, counts)
        )

    @contextmanager
    def _writing(self, share: Share, name: str) -> Iterator[Callable[[_Values], object]]:
        """Write the file of a share within this context. Yields a function that adds values."""
        folder = share.folder(self.folder / name)
        _disown(folder)
        if name == VOCABULARY:
            counts_V = np.zeros(self.vocab_size + 1, np.int64)
            yield partial(np.add, counts_V, out=counts_V)
            write_rows(folder / f"{name}_metric_value", counts_V, [len(counts_V)])
        else:
            with appending_values(folder / f"{name}_sample_to_metric", np.dtype("<i8")) as append:
                yield append
        self._identify(folder, name, share)

    def _parts(self, name: str, shares: Sequence[Share]) -> list[Path]:
        """Return the checked files of shares. Raises the first error, naming all shares to redo."""
        parts: list[Path] = []
        failed: dict[int, list[int]] = {}
        errors: list[OSError | ValueError] = []
        for share in shares:
            try:
                parts.append(self._part(name, share))
            except (FileNotFoundError, ValueError) as error:
                errors.append(error)
                failed.setdefault(share.worker, []).append(share.thread)
        if not errors:
            return parts
        again = ", ".join(
            f"--analyzing-worker-id {worker}"
            + f" --analyzing-specific-threads {' '.join(map(str, threads))}"
            * (len(threads) < self.threads)
            for worker, threads in failed.items()
        )
        raise type(errors[0])(
            f"{errors[0]}: run --analyzing-task map with {again}, and the flags of this step"
        )

    def _part(self, name: str, share: Share) -> Path:
        """Return the prefix of a share's values or token counts, after checking them."""
        folder = share.folder(self.folder / name)
        rows, length = "sample_to_metric", len(share.numbers)
        if name == VOCABULARY:
            rows, length = "metric_value", self.vocab_size + 1
        try:
            count = len(read_values(folder / f"{name}_{rows}"))
        except FileNotFoundError as error:
            raise FileNotFoundError(str(error).partition(";")[0]) from None
        if count != length or not self._is_of_these(folder, name, share):
            raise ValueError(
                f"{folder} was made of other samples, or with another --analyzing-num-workers or "
                f"--analyzing-num-threads than {self.workers} and {self.threads}"
            )
        return folder / f"{name}_{rows}"

    def rarity(self) -> Rarity:
        """Return the rarities of tokens, from token counts that must exist already."""
        folder = self.folder / VOCABULARY
        first = f"run --analyzing-metric {VOCABULARY}, map and reduce, first"
        try:
            counts_V = read_values(folder / f"{VOCABULARY}_metric_value")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"--analyzing-metric {' '.join(self._of_rarity)} needs the token counts of all "
                f"samples, and {str(error).partition(';')[0]}: {first}"
            ) from None
        if len(counts_V) != self.vocab_size + 1 or not self._is_of_these(folder, VOCABULARY):
            raise ValueError(f"{folder} was made of other samples, or another vocabulary: {first}")
        rarity_V = token_rarity(counts_V.astype(np.int64))
        highest = self.seq_length * float(rarity_V.max())
        return Rarity(rarity_V, 10 ** (math.ceil(math.log10(highest)) + 1))

    @property
    def _of_rarity(self) -> list[str]:
        return [name for name in self.metrics if name in RARITIES]

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.dataset)

    def _identity(self, name: str, share: Share | None) -> dict[str, Any]:
        samples = {"samples": len(self.dataset), "fingerprint": self._fingerprint}
        numbers = {} if share is None else {"first": share.numbers.start}
        return {"metric": name, **samples, **numbers}

    def _identify(self, folder: Path, name: str, share: Share | None = None) -> None:
        content = json.dumps(self._identity(name, share), indent=1)
        write_whole(folder / ANALYSED, content.encode())

    def _is_of_these(self, folder: Path, name: str, share: Share | None = None) -> bool:
        """Return True if a folder identifies these samples or, like DeepSpeed's, no samples."""
        file = folder / ANALYSED
        if not file.is_file():
            return True
        return bool(parse_json(file.read_bytes(), str(file)) == self._identity(name, share))


def analyse(
    analysis: Analysis, progress: Progress = lambda done, total: None
) -> list[MetricSummary]:
    """Run both steps for all metrics, with ``analysis.threads`` processes. Token counts are first
    if a metric needs them. Raises the errors of :class:`Analysis`."""
    counted = VOCABULARY in analysis.metrics or bool(set(RARITIES) & set(analysis.metrics))
    others = tuple(name for name in analysis.metrics if name != VOCABULARY)
    passes = [metrics for metrics in ((VOCABULARY,) * counted, others) if metrics]
    summaries: dict[str, MetricSummary] = {}
    samples = len(analysis.dataset)
    for number, metrics in enumerate(passes):
        each = dataclasses.replace(analysis, metrics=metrics)
        told = partial(_later, progress, number * samples, len(passes) * samples)
        each.map(progress=told)
        summaries |= {summary.name: summary for summary in each.reduce(analysis.threads)}
        for name, share in product(metrics, each.shares(0)):
            shutil.rmtree(share.folder(analysis.folder / name))
    return [summaries[name] for name in analysis.metrics]


def _disown(folder: Path) -> None:
    """Mark a folder's files as belonging to no samples. If a step is killed, older files remain;
    without this mark they would be mistaken for DeepSpeed's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / ANALYSED, b'{"fingerprint": null}')


def _later(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def merge(prefix: Path, parts: Sequence[Path], processes: int) -> tuple[_Values, _Values]:
    """Write the files of a metric from its samples' values in the files with the prefixes
    ``parts``. Return the distinct values, ascending, and the number of occurrences of each."""

    def file(name: str) -> Path:
        return prefix.with_name(f"{prefix.name}_{name}")

    sizes = [len(read_values(part)) for part in parts]
    blocks = [
        ValueBlock(part, start)
        for part, size in zip(parts, sizes, strict=True)
        for start in range(0, size, BLOCK)
    ]
    # For fewer values, starting a process would cost more than it saves.
    processes = max(1, min(processes, sum(sizes) // BLOCK))
    values: _Values = np.empty(0, np.int64)
    counts: _Values = np.empty(0, np.int64)
    for _, more in _in_processes(blocks, _counted, processes):
        values, counts = _united(values, counts, *more)
    dtype = fitting_dtype(int(values[0]), int(values[-1]))
    with appending_values(file("sample_to_metric"), dtype) as append:
        for block in blocks:
            append(block.values)
    write_rows(file("index_to_metric"), values, np.ones_like(counts))
    total, ends = int(counts.sum()), np.cumsum(counts)
    numbers = fitting_dtype(0, total - 1)
    with replacing_values(file("index_to_sample")) as part:
        with part.open("xb") as whole:
            # Reserve the space: a full disk is an error here, but a signal in a later write.
            os.posix_fallocate(whole.fileno(), 0, total * numbers.itemsize)
        bounds = np.searchsorted(ends, np.linspace(0, total, processes + 1)[1:-1])
        rows = [range(*pair) for pair in pairwise([0, *bounds.tolist(), len(values)])]
        scatter = partial(_scatter, blocks, values, ends - counts, part, numbers)
        for _ in _in_processes(rows, scatter, processes):
            pass
    write_index(file("index_to_sample"), numbers, counts)
    with replacing_values(file("index_to_sample_percentile_merged")) as part:
        shutil.copyfile(f"{file('index_to_sample')}.bin", part)
    merged = np.add.reduceat(counts, np.arange(0, len(counts), max(1, len(counts) // _MERGED_ROWS)))
    write_index(file("index_to_sample_percentile_merged"), numbers, merged)
    return values, counts


def _counted(block: ValueBlock) -> tuple[_Values, _Values]:
    values, counts = np.unique(block.values, return_counts=True)
    return values.astype(np.int64), counts


def _united(
    values: _Values, counts: _Values, more: _Values, more_counts: _Values
) -> tuple[_Values, _Values]:
    both, places = np.unique(np.concatenate([values, more]), return_inverse=True)
    total = np.zeros(len(both), np.int64)
    np.add.at(total, places, np.concatenate([counts, more_counts]))
    return both, total


def _scatter(
    blocks: Sequence[ValueBlock],
    values: _Values,
    starts: _Values,
    path: Path,
    dtype: np.dtype,
    rows: range,
) -> None:
    """Write the numbers of the samples with these ``rows`` of values to the file of all values.
    ``starts`` has the position of the first sample of each value."""
    if not rows:
        return
    lowest, highest = values[rows.start], values[rows[-1]]
    file, free, before = np.memmap(path, dtype, "r+"), starts.copy(), 0
    for block in blocks:
        read = block.values
        numbers = np.flatnonzero((read >= lowest) & (read <= highest))
        row = np.searchsorted(values, read[numbers])
        order = np.argsort(row, kind="stable")
        row = row[order]
        first = np.flatnonzero(np.diff(row, prepend=-1))
        counts = np.diff(first, append=len(row))
        places = free[row] + np.arange(len(row)) - np.repeat(first, counts)
        file[places] = before + numbers[order]
        free[row[first]] += counts
        before += len(read)


def token_rarity(counts_V: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return -log of each token's share of all tokens. As in Megatron-DeepSpeed, tokens that never
    occur count as occurring once."""
    seen_V = np.maximum(counts_V, 1)
    return -np.log(seen_V / seen_V.sum())


def sample_tokens(sample: Any) -> npt.NDArray[np.int64]:
    """Return the tokens of a sample without padding: its inputs, and for a GPT also the last label.
    Raises ValueError if this type of sample has no metrics."""
    sample = _text(sample)
    if hasattr(sample, "text_tokens"):
        return sample.text_tokens
    if isinstance(sample, PackedSample):
        last_S = sample.document_ids_S == sample.document_ids_S[-1]
        # Padding is a last document without loss.
        padded = not sample.loss_mask_S[last_S].any()
        length = len(last_S) - int(last_S.sum()) if padded else len(last_S)
        return sample.tokens_T[: length + 1] if length else sample.tokens_T[:0]
    if isinstance(sample, np.ndarray) and sample.ndim == 1:
        return sample
    raise ValueError(f"samples of the type {type(sample).__name__} have no metrics")


def sample_length(sample: Any, tokens_T: npt.NDArray[np.int64]) -> int:
    """Return the number of inputs of a sample that has these tokens."""
    return len(tokens_T) if hasattr(sample, "text_tokens") else max(0, len(tokens_T) - 1)


def fingerprint(dataset: SampleDataset[Any]) -> str:
    """Return a digest of the size of a dataset and of evenly spaced samples."""
    count = len(dataset)
    probes = min(count, _PROBES)
    numbers = (probe * (count - 1) // max(probes - 1, 1) for probe in range(probes))
    samples = (_text(dataset[number]) for number in numbers)
    parts = (part for s in samples for part in (s if isinstance(s, tuple) else (s,)))
    arrays = (np.asarray(part).tobytes() for part in parts if part is not None)
    return digest_of_parts(chain((str(count),), arrays))


def _text(sample: Any) -> Any:
    """Return the text of a sample. Retrieved neighbours, if any, do not affect its difficulty."""
    return getattr(sample, "text", sample)


def _measure(
    dataset: SampleDataset[Any],
    metrics: Sequence[str],
    rarity: Rarity | None,
    vocab_size: int,
    block: tuple[Share, range],
) -> dict[str, npt.NDArray[np.int64]]:
    """Return the metrics' values for a block of samples, of token counts the sum."""
    numbers = block[1]
    values_of = {name: np.empty(len(numbers), np.int64) for name in metrics if name != VOCABULARY}
    counts_V = np.zeros(vocab_size + 1, np.int64)  # one extra row, as in Megatron-DeepSpeed
    texts: list[npt.NDArray[np.int64]] = []
    for place, number in enumerate(numbers):
        sample = dataset[number]
        tokens_T = sample_tokens(sample)
        for name, values in values_of.items():
            value = 0
            if name != "vocab_rarity":
                value = sample_length(sample, tokens_T)
            if rarity is not None and name in RARITIES:
                value = value * rarity.coefficient + int(rarity.of_tokens_V[tokens_T].sum())
            values[place] = value
        if VOCABULARY in metrics:
            texts.append(tokens_T)
            if len(texts) == _TEXTS_AT_ONCE or number == numbers[-1]:
                counts_V += np.bincount(np.concatenate(texts), minlength=len(counts_V))
                texts.clear()
    return values_of | ({VOCABULARY: counts_V} if VOCABULARY in metrics else {})


def _divided(numbers: range, parts: int) -> list[range]:
    bounds = np.linspace(numbers.start, numbers.stop, parts + 1, dtype=np.int64).tolist()
    return [range(*pair) for pair in pairwise(bounds)]


def _blocks(numbers: range) -> list[range]:
    least = min(len(numbers), _BLOCKS_PER_THREAD)
    return _divided(numbers, max(1, least, len(numbers) // _LARGEST_BLOCK))


def _in_processes(
    items: Sequence[Item], work: Callable[[Item], Answer], processes: int
) -> Iterator[tuple[Item, Answer]]:
    """Yield each item with its result, in order. Use at most ``processes`` processes."""
    count = min(processes, len(items), usable_processors())
    try:
        yield from map_in_order(iter(items), partial(_ready, work), count if count > 1 else 0)
    except ChildProcessError as error:
        text = f"{error}; the files are not complete: run it again"
        raise ChildProcessError(text) from error


def _ready(work: Callable[[Item], Answer]) -> Callable[[Item], Answer]:
    """Return ``work``, which `map_in_order` requests once in each process."""
    return work


def _percentiles(values: _Values, counts: _Values) -> dict[int, int]:
    ends = np.cumsum(counts)
    places = [(int(ends[-1]) - 1) * share // 100 for share in _PERCENTILES]
    chosen = values[np.searchsorted(ends, places, side="right")].tolist()
    return dict(zip(_PERCENTILES, chosen, strict=True))
