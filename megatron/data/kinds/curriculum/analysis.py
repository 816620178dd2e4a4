"""Difficulties of all samples of a dataset, in the files of DeepSpeed's data analyzer.

    NAME_sample_to_metric    row i: the value of sample i
    NAME_index_to_metric     row i: the i-th of the values that occur, in rising order
    NAME_index_to_sample     row i: the samples that have it, in rising order

Each is a pair of files .bin and .idx with the layout of Megatron's indexed datasets (see
``megatron.data.indexed``), one document of all rows, except for the codes of three dtypes: 6, 7 and
8 are unsigned integers of 2, 4 and 8 bytes. A file has the smallest dtype, the unsigned ones first,
that fits all its values.

Shape suffixes: T the tokens of a sample, V vocabulary, N samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.indexed.dataset import HEADER, MAGIC, VERSION, map_file
from megatron.data.samples import PackedSample, SampleDataset
from megatron.util.digests import digest_of_parts
from megatron.util.files import write_whole
from megatron.util.processes import map_in_order

METRICS = ("seqlen", "vocab_rarity")
VOCABULARY = "total_vocab_freq"
"""Folder of the token counts, named as by Megatron-DeepSpeed."""
ANALYSED = "dataset.json"
"""File in the folder of a metric that identifies the analysed samples."""
_PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_SHARES_PER_PROCESS = 4
_LARGEST_SHARE = 50_000
_MERGED_ROWS = 100
_PROBES = 32
_DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8"), start=1)
}


class MetricSummary(NamedTuple):
    """The values of a metric: where their files are, how many there are, their distribution."""

    name: str
    folder: Path
    samples: int
    values: int
    """Number of distinct values."""
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

    Metric ``seqlen`` counts tokens without padding; ``vocab_rarity`` is the sum of -log(share of
    the token among all tokens of the dataset), rounded down. ``vocab_size`` is that of the (padded)
    token embedding. ``progress`` is called with the number of samples read and their total. Raises
    ValueError if a metric is unknown, or samples have a type without metrics; OSError if a process
    was killed.
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

    def of_shares(work: Callable[[range], Any], before: int) -> Iterator[Any]:
        workers = processes if processes > 1 else 0
        try:
            for share, part in map_in_order(iter(shares), partial(_given, work), workers):
                progress(before + share.stop, passes * len(dataset))
                yield part
        except ChildProcessError as error:
            text = f"{error}; the files are not complete: run it again"
            raise ChildProcessError(text) from error

    if "vocab_rarity" in metrics:
        counts = of_shares(partial(_count_tokens, dataset, vocab_size), 0)
        counts_V = sum(counts, np.zeros(vocab_size + 1, np.int64))
        write_rows(root / VOCABULARY / f"{VOCABULARY}_metric_value", counts_V, [len(counts_V)])
        rarity_V = token_rarity(counts_V)
    work = partial(_measure, dataset, tuple(metrics), rarity_V)
    found = list(of_shares(work, (passes - 1) * len(dataset)))
    return [
        _write_metric(root / name, name, np.concatenate([part[name] for part in found]), identity)
        for name in metrics
    ]


def _given(work: Callable[[range], Any]) -> Callable[[range], Any]:
    """What `map_in_order` calls in each process to get the function."""
    return work


def token_rarity(counts_V: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """-log of each token's share of all tokens; as in Megatron-DeepSpeed, a token that never occurs
    counts as one that occurs once."""
    seen_V = np.maximum(counts_V, 1)
    return -np.log(seen_V / seen_V.sum())


def sample_tokens(sample: Any) -> npt.NDArray[np.int64]:
    """The tokens of a sample without padding: the inputs, and of a GPT the label of the last one.
    Raises ValueError if the type of the samples has no metrics."""
    sample = _text(sample)
    if hasattr(sample, "inputs"):
        return sample.inputs
    if isinstance(sample, PackedSample):
        last_S = sample.document_ids_S == sample.document_ids_S[-1]
        # Padding is a document without a loss at the end.
        padded = not sample.loss_mask_S[last_S].any()
        length = len(last_S) - int(last_S.sum()) if padded else len(last_S)
        return sample.tokens_T[: length + 1] if length else sample.tokens_T[:0]
    if isinstance(sample, np.ndarray) and sample.ndim == 1:
        return sample
    raise ValueError(f"samples of the type {type(sample).__name__} have no metrics")


def sample_length(sample: Any, tokens_T: npt.NDArray[np.int64]) -> int:
    """Number of inputs of a sample with these tokens."""
    return len(tokens_T) if hasattr(sample, "inputs") else max(0, len(tokens_T) - 1)


def fingerprint(dataset: SampleDataset[Any]) -> str:
    """Identifies a dataset by its number of samples and by some of them, evenly spaced."""
    count = len(dataset)
    probes = min(count, _PROBES)
    numbers = (probe * (count - 1) // max(probes - 1, 1) for probe in range(probes))
    samples = (_text(dataset[number]) for number in numbers)
    parts = (part for s in samples for part in (s if isinstance(s, tuple) else (s,)))
    return digest_of_parts(chain((str(count),), (np.asarray(p).tobytes() for p in parts)))


def _text(sample: Any) -> Any:
    """Of a sample with neighbours its text, which the difficulty is of."""
    return getattr(sample, "text", sample)


def _count_tokens(dataset: SampleDataset[Any], vocab_size: int, numbers: range) -> np.ndarray:
    counts_V = np.zeros(vocab_size + 1, np.int64)  # one row more, as in Megatron-DeepSpeed
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
        sample = dataset[number]
        tokens_T = sample_tokens(sample)
        for name in metrics:
            if name == "seqlen":
                values[name][place] = sample_length(sample, tokens_T)
            else:
                assert rarity_V is not None
                values[name][place] = int(rarity_V[tokens_T].sum())
    return values


def _shares(count: int, processes: int) -> list[range]:
    shares = min(count, max(processes * _SHARES_PER_PROCESS, count // _LARGEST_SHARE))
    bounds = np.linspace(0, count, shares + 1, dtype=np.int64).tolist()
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _write_metric(
    folder: Path, name: str, values_N: npt.NDArray[np.int64], identity: Mapping[str, Any]
) -> MetricSummary:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANALYSED).unlink(missing_ok=True)
    order_N = np.argsort(values_N, kind="stable")
    values, counts = np.unique(values_N, return_counts=True)
    step = max(1, len(values) // _MERGED_ROWS)
    merged = np.add.reduceat(counts, np.arange(0, len(counts), step))
    for file, content, lengths in (
        ("sample_to_metric", values_N, np.ones(len(values_N), np.int64)),
        ("index_to_metric", values, np.ones(len(values), np.int64)),
        ("index_to_sample", order_N, counts),
        ("index_to_sample_percentile_merged", order_N, merged),
    ):
        write_rows(folder / f"{name}_{file}", content, lengths)
    write_whole(folder / ANALYSED, json.dumps({"metric": name, **identity}, indent=1).encode())
    found = np.percentile(values_N, _PERCENTILES, method="lower").tolist()
    percentiles = dict(zip(_PERCENTILES, found, strict=True))
    return MetricSummary(name, folder, len(values_N), len(values), percentiles)


@dataclass(frozen=True)
class MetricRows:
    values: npt.NDArray[np.integer]
    """All rows, concatenated."""
    ends: npt.NDArray[np.int64]
    """End of each row in ``values``, int64[rows]."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> npt.NDArray[np.integer]:
        start = int(self.ends[row - 1]) if row else 0
        return self.values[start : int(self.ends[row])]


def read_rows(prefix: str) -> MetricRows:
    """Maps a pair of files. Raises FileNotFoundError if one of them is missing, ValueError if they
    are damaged or do not belong together."""
    bin_file, idx_file = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (idx_file, bin_file):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; tools/analyze_data.py writes it, and a path is that of "
                "the .bin and .idx files without the ending"
            )
    content = idx_file.read_bytes()
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise ValueError(f"{idx_file} is not an index of DeepSpeed's data analyzer")
    _, version, code, rows, documents = HEADER.unpack_from(content)
    expected = HEADER.size + 12 * rows + 8 * documents
    if version != VERSION or code not in _DTYPES or len(content) != expected:
        raise ValueError(
            f"{idx_file} is damaged: version {version}, dtype code {code}, {len(content)} bytes "
            f"where its {rows} rows make {expected}"
        )
    ends = np.cumsum(np.frombuffer(content, "<i4", rows, HEADER.size), dtype=np.int64)
    dtype, total = _DTYPES[code], int(ends[-1]) if rows else 0
    size = bin_file.stat().st_size
    if size != total * dtype.itemsize:
        raise ValueError(
            f"{bin_file} has {size} bytes, but {idx_file} expects {total * dtype.itemsize}: it "
            "was cut short, or the two come from different analyses"
        )
    return MetricRows(map_file(bin_file, dtype), ends)


def write_rows(prefix: str | Path, values: npt.NDArray[np.integer], lengths: npt.ArrayLike) -> None:
    """Writes a pair of files from the concatenated values of all rows and the rows' lengths."""
    sizes = np.asarray(lengths, np.int64)
    assert sizes.sum() == len(values)
    if len(sizes) and sizes.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{prefix}: a row of {sizes.max()} values; the format allows 2**31 - 1")
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    code, dtype = next(
        (code, dtype)
        for code, dtype in sorted(_DTYPES.items(), key=lambda item: item[1].itemsize)
        if dtype.kind == ("u" if low >= 0 else "i")
        and np.iinfo(dtype).min <= low
        and high <= np.iinfo(dtype).max
    )
    offsets = (np.cumsum(sizes) - sizes) * dtype.itemsize
    index = b"".join(
        [
            HEADER.pack(MAGIC, VERSION, code, len(sizes), 2),
            sizes.astype("<i4").tobytes(),
            offsets.astype("<i8").tobytes(),
            np.array([0, len(sizes)], "<i8").tobytes(),
        ]
    )
    bin_file, idx_file = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    bin_file.parent.mkdir(parents=True, exist_ok=True)
    # An old index must never describe new values, not even after a kill between the two.
    idx_file.unlink(missing_ok=True)
    write_whole(bin_file, np.ascontiguousarray(values.astype(dtype, copy=False)).data)
    write_whole(idx_file, index)
