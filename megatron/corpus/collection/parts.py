"""Documents to fixed parts, train, valid and test, so that equal texts are in one part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.corpus.collection.command import json_inputs, required
from megatron.corpus.collection.job import Job, Report, RunConfig, read_lines, run
from megatron.corpus.collection.lines import (
    BadRecord,
    Emit,
    Mapped,
    Record,
    map_records,
    records_of,
    value_of,
)
from megatron.corpus.collection.workers import BatchStep
from megatron.corpus.preprocessing.inputs import LineBatch
from megatron.util.digests import hash64

PARTS = ("train", "valid", "test")
_HASHES = 1 << 64


@dataclass(frozen=True)
class SplitConfig:
    """Splitting a corpus into train, valid and test."""

    input: tuple[str, ...] = option((), aliases=("--input-files", "--input_files"))
    """JSON-lines files, globs or folders, plain or packed by gzip or zstd."""
    output_dir: str | None = option(None, aliases=("--output_dir",))
    """Folder for train.jsonl, valid.jsonl and test.jsonl."""
    split: str = option("90,5,5")
    """Shares of train, valid and test; what counts is their ratio."""
    method: str = option("hash", choices=("hash", "exact"))
    """hash: the hash of a text says its part, whatever else is in the corpus; the shares come out
    nearly. exact: the same hash is the order of a shuffle, which is cut at the exact shares."""
    key: str = option("text")
    """Key of what is hashed; documents with the same value under it are in the same part."""
    seed: int = option(1234)
    """Another seed makes another split."""
    pack: str = option("none", choices=("none", "gz", "zst"))
    """How the parts are packed."""


@dataclass(frozen=True)
class SplitStep:
    """Part i takes the documents whose hash is below bounds[i] and not below bounds[i - 1]."""

    key: str
    seed: int
    bounds: tuple[int, ...]
    names: tuple[str, ...]

    def build(self) -> BatchStep:
        def step(record: Record, counts: Counter[str]) -> Iterator[Emit]:
            value = hash_of(record, self.key, self.seed)
            part = next(i for i, bound in enumerate(self.bounds) if value < bound)
            counts[f"to {self.names[part]}"] += 1
            yield part, record.unchanged()

        def batch_step(batch: LineBatch) -> Mapped:
            return map_records(batch, (), step, outputs=len(self.bounds))

        return batch_step


def hash_of(record: Record, key: str, seed: int) -> int:
    """64 bits of BLAKE2b, keyed by the seed, of what a record has under a key.

    Raises:
        BadRecord: it has no such key.
    """
    value = value_of(record, key)
    data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
    return hash64(data, str(seed).encode())


def cumulative_shares(split: str) -> tuple[float, ...]:
    """Where train, valid and test end, the whole being 1; the last is exactly 1.

    Raises:
        ConfigError: these are not three numbers from 0 up with a sum above 0.
    """
    try:
        numbers = [float(number) for number in split.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        raise ConfigError(f"--split {split} must be three numbers such as 90,5,5")
    return tuple(sum(numbers[: i + 1]) / sum(numbers) for i in range(3))


def exact_bounds(hashes: npt.NDArray[np.uint64], ends: Sequence[float]) -> tuple[int, ...]:
    """Bounds that cut the documents at the given shares, as near as equal texts let them.

    Args:
        hashes: one for each document, [n].
        ends: cumulative shares of the parts, the last 1.
    """
    values, counts = np.unique(hashes, return_counts=True)
    below = np.concatenate(([0], np.cumsum(counts)))  # documents before each different hash
    bounds = []
    for end in ends[:-1]:
        cut = int(np.argmin(np.abs(below - round(end * len(hashes)))))
        bounds.append(int(values[cut]) if cut < len(values) else _HASHES)
    return (*bounds, _HASHES)


def split_corpus(config: SplitConfig, running: RunConfig) -> Report:
    """Writes each document to its part.

    Raises:
        ConfigError: a flag is missing or makes no sense.
        ValueError, OSError: see `job.run`.
    """
    required(input=config.input, output_dir=config.output_dir)
    assert config.output_dir is not None
    inputs, ends = json_inputs(config.input), cumulative_shares(config.split)
    if config.method == "exact":
        bounds = exact_bounds(_hashes(inputs, config), ends)
    else:
        bounds = tuple(round(end * _HASHES) for end in ends)
    ending = ".jsonl" if config.pack == "none" else f".jsonl.{config.pack}"
    step = SplitStep(config.key, config.seed, bounds, PARTS)
    outputs = [Path(config.output_dir) / (part + ending) for part in PARTS]
    return run(Job("split_json", inputs, outputs, step, settings=asdict(step)), running)


def _hashes(inputs: Sequence[Path], config: SplitConfig) -> npt.NDArray[np.uint64]:
    """Of all documents, malformed lines left out: it is the second reading that reports them."""
    parts = [np.empty(0, np.uint64)]
    for batch in read_lines(inputs):
        hashes = []
        for record in records_of(batch, ()):
            if isinstance(record, Record):
                with suppress(BadRecord):
                    hashes.append(hash_of(record, config.key, config.seed))
        parts.append(np.array(hashes, np.uint64))
    return np.concatenate(parts)
