"""Difficulties of all samples of a dataset, written as DeepSpeed's data analyzer writes them.

Shape suffixes: T the tokens of a sample, V vocabulary, N samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.kinds.curriculum.drawn import ANALYSED, fingerprint
from megatron.data.kinds.curriculum.metric_files import write_rows
from megatron.data.samples import PackedSample, SampleDataset
from megatron.util.files import write_whole
from megatron.util.processes import mapping_processes

METRICS = ("seqlen", "vocab_rarity")
VOCABULARY = "total_vocab_freq"
"""Folder of the token counts, under the name that Megatron-DeepSpeed gives them."""
_SHARES_PER_PROCESS = 4
_LARGEST_SHARE = 50_000
_MERGED_ROWS = 100


@dataclass(frozen=True)
class MetricSummary:
    """The values of a metric.

    Attributes:
        name: the metric's.
        folder: where its files are.
        samples: how many there are.
        values: how many different values.
        percentiles: value of the 0th, 5th, 25th, 50th, 75th, 95th and 100th percentile.
    """

    name: str
    folder: Path
    samples: int
    values: int
    percentiles: dict[int, int]


def analyse(
    dataset: SampleDataset[Any],
    metrics: Sequence[str],
    folder: str | Path,
    vocab_size: int,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[MetricSummary]:
    """Writes ``folder/NAME/NAME_{sample_to_metric,index_to_metric,index_to_sample}``, and
    ``NAME_index_to_sample_percentile_merged`` with a hundredth of the values in each row.

    Args:
        dataset: the samples.
        metrics: some of :data:`METRICS`. ``seqlen`` counts tokens without padding; ``vocab_rarity``
            adds up -log(share of the token among all tokens of the dataset), and is rounded down.
        vocab_size: rows of the (padded) token table.
        processes: that read the samples.
        progress: told now and then how many samples have been read of how many.

    Raises:
        ValueError: there is no such metric, or samples of another kind than it is known for.
        OSError: a process was killed.
    """
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"--analyzing-metric {name} must be one of {', '.join(METRICS)}")
    if not len(dataset):
        raise ValueError("the dataset has no samples")
    root = Path(folder)
    identity = {"samples": len(dataset), "fingerprint": fingerprint(dataset)}
    rarity_V, passes = None, 1 + ("vocab_rarity" in metrics)
    shares = _shares(len(dataset), processes)

    def said(parts: Iterator[Any], before: int) -> Iterator[Any]:
        for part, share in zip(parts, shares, strict=True):
            progress(before + share.stop, passes * len(dataset))
            yield part

    killed = (
        f"one of the {processes} processes that read samples was killed, by the system if memory "
        "ran out; the files are not complete: run it again with fewer"
    )
    with mapping_processes(processes, killed) as each:
        if "vocab_rarity" in metrics:
            counts = said(each(partial(_count_tokens, dataset, vocab_size), shares), 0)
            counts_V = sum(counts, np.zeros(vocab_size + 1, np.int64))
            _write_vocabulary(root / VOCABULARY, counts_V)
            rarity_V = token_rarity(counts_V)
        work = partial(_measure, dataset, tuple(metrics), rarity_V)
        found = list(said(each(work, shares), (passes - 1) * len(dataset)))
    return [
        _write_metric(root / name, name, np.concatenate([part[name] for part in found]), identity)
        for name in metrics
    ]


def token_rarity(counts_V: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """-log of each token's share of all tokens; a token that never occurs counts as one that does
    once, as in Megatron-DeepSpeed."""
    seen_V = np.maximum(counts_V, 1)
    return -np.log(seen_V / seen_V.sum())


def sample_tokens(sample: Any) -> npt.NDArray[np.int64]:
    """The tokens of a sample without padding: the inputs, and the label of the last one.

    Raises:
        ValueError: the sample is of a kind that is not known.
    """
    if isinstance(sample, PackedSample):
        last_S = sample.document_ids_S == sample.document_ids_S[-1]
        # Padding is a document without a loss at the end.
        padded = not sample.loss_mask_S[last_S].any()
        length = len(last_S) - int(last_S.sum()) if padded else len(last_S)
        return sample.tokens_T[: length + 1] if length else sample.tokens_T[:0]
    if isinstance(sample, np.ndarray) and sample.ndim == 1:
        return sample
    raise ValueError(
        f"samples of the kind {type(sample).__name__} have no metrics; those of GPTs do"
    )


def _count_tokens(dataset: SampleDataset[Any], vocab_size: int, numbers: range) -> np.ndarray:
    counts_V = np.zeros(vocab_size + 1, np.int64)  # one row more, as Megatron-DeepSpeed has it
    for number in numbers:
        tokens_T = sample_tokens(dataset[number])
        counts_V += np.bincount(tokens_T, minlength=len(counts_V))
    return counts_V


def _measure(
    dataset: SampleDataset[Any],
    metrics: Sequence[str],
    rarity_V: npt.NDArray[np.float64] | None,
    numbers: range,
) -> dict[str, npt.NDArray[np.int64]]:
    values = {name: np.empty(len(numbers), np.int64) for name in metrics}
    for place, number in enumerate(numbers):
        tokens_T = sample_tokens(dataset[number])
        for name in metrics:
            if name == "seqlen":
                values[name][place] = max(0, len(tokens_T) - 1)
            else:
                assert rarity_V is not None
                values[name][place] = int(rarity_V[tokens_T].sum())
    return values


def _shares(count: int, processes: int) -> list[range]:
    """Sample numbers in shares of about the same size."""
    shares = min(count, max(processes * _SHARES_PER_PROCESS, count // _LARGEST_SHARE))
    bounds = np.linspace(0, count, shares + 1, dtype=np.int64).tolist()
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def _write_vocabulary(folder: Path, counts_V: npt.NDArray[np.int64]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(str(folder / f"{VOCABULARY}_metric_value"), counts_V, [len(counts_V)])


def _write_metric(
    folder: Path, name: str, values_N: npt.NDArray[np.int64], identity: Mapping[str, Any]
) -> MetricSummary:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANALYSED).unlink(missing_ok=True)
    order_N = np.argsort(values_N, kind="stable")
    values, counts = np.unique(values_N, return_counts=True)
    step = max(1, len(values) // _MERGED_ROWS)
    merged = np.add.reduceat(counts, np.arange(0, len(counts), step))
    prefix = str(folder / name)
    write_rows(f"{prefix}_sample_to_metric", values_N, np.ones(len(values_N), np.int64))
    write_rows(f"{prefix}_index_to_metric", values, np.ones(len(values), np.int64))
    write_rows(f"{prefix}_index_to_sample", order_N, counts)
    write_rows(f"{prefix}_index_to_sample_percentile_merged", order_N, merged)
    write_whole(folder / ANALYSED, json.dumps({"metric": name, **identity}, indent=1).encode())
    shares = (0, 5, 25, 50, 75, 95, 100)
    found = np.percentile(values_N, shares, method="lower").tolist()
    percentiles = dict(zip(shares, found, strict=True))
    return MetricSummary(name, folder, len(values_N), len(values), percentiles)
