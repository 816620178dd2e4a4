"""Near-duplicates: MinHash, locality-sensitive hashing, verification; groups, and removal.

The signature of a document is cut into bands; documents with an equal band are candidates. Of two
with Jaccard similarity J, and signatures of b bands of r values, that happens with probability 1 -
(1 - J^r)^b (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4). Candidates whose
signatures are alike are compared shingle by shingle, so that reported similarities are exact.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.corpus.collection.fingerprints import (
    FingerprintConfig,
    FingerprintedDocuments,
    make_fingerprints,
    similarity,
)
from megatron.apps.corpus.collection.json_files import (
    JsonRecord,
    RecordStep,
    json_line,
    read_records,
    write_packed,
)
from megatron.apps.corpus.collection.line_job import (
    JobReport,
    LineJob,
    LineJobConfig,
    json_inputs,
    required,
    run,
)
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.util.digests import sha256

_ALL_PAIRS = 50  # documents of one bucket up to which each is compared with each
_DEVIATIONS = 4.0  # an estimate this many standard deviations below the threshold is still verified
_ROWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True)
class DuplicateConfig:
    """Finding near-duplicates."""

    inputs: tuple[str, ...] = option((), aliases=("--input",))
    """JSON-lines files, plain or compressed, each followed by the key of its ids: cc.json cc_id
    news.json url."""
    output: str | None = option(None)
    """File of the duplicates found: a line {"id": [{"other id": similarity}, ...]} each."""
    text_key: str = option("text")
    """Key of the text."""
    threshold: float = option(0.7)
    """Least similarity of near-duplicates."""
    jaccard: str = option("union", choices=("union", "min", "max"))
    """Shared shingles divided by the size of the union, of the smaller set or of the larger set."""
    num_seeds: int = option(252)
    """Values of a MinHash signature."""
    num_bands: int = option(42)
    """Bands that the signature is cut into."""
    heuristic_iter: int = option(-1)
    """In a bucket of many documents, one is compared with all others, and those similar to it are
    removed from the bucket; at most this often (-1: until none is left)."""
    save_fingerprints: str | None = option(None)
    """Folder to keep the fingerprints of --inputs in, for other runs."""
    load_fingerprints: tuple[str, ...] = option(())
    """Folders of --save-fingerprints to compare with, besides --inputs, and before them."""
    seed: int = option(1234)
    """Seed of the hash functions."""

    def check(self) -> None:
        required(self, "output")
        if not self.inputs and not self.load_fingerprints:
            raise ConfigError("--inputs is missing: pairs of a file and the key of its ids")
        if len(self.inputs) % 2:
            raise ConfigError(
                f"--inputs {' '.join(self.inputs)} must be pairs of a file and the key of its ids"
            )
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"--threshold {self.threshold} must be above 0 and at most 1")
        if self.num_bands < 1 or self.num_seeds < 1 or self.num_seeds % self.num_bands:
            raise ConfigError(
                f"--num-seeds {self.num_seeds} must be a multiple of --num-bands {self.num_bands}"
            )


class DuplicateReport(NamedTuple):
    documents: int
    candidates: int  # pairs whose signatures share a band
    verified: int  # candidates compared shingle by shingle
    pairs: int  # pairs at or above the threshold

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.candidates:,} candidate pairs, "
            f"{self.verified:,} compared in full, {self.pairs:,} pairs of near-duplicates"
        )


def find_duplicates(config: DuplicateConfig, running: LineJobConfig) -> DuplicateReport:
    """Write the pairs of near-duplicates. The fingerprints of a stopped run are used."""
    config.check()
    output = Path(config.output or "")
    work = Path(config.save_fingerprints or f"{output}.fingerprints")
    folders: list[Path] = []
    for kept in map(Path, config.load_fingerprints):
        folders += sorted(path.parent for path in kept.glob("*/about.json"))
        if not any(folder.parent == kept for folder in folders):
            raise FileNotFoundError(f"--load-fingerprints {kept} contains no fingerprints")
    for number, (name, key) in enumerate(zip(config.inputs[::2], config.inputs[1::2], strict=True)):
        if not Path(name).is_file():
            raise FileNotFoundError(f"--inputs {name} is not a file")
        how = FingerprintConfig(key, config.text_key, config.num_seeds, config.seed)
        folders.append(work / f"{number:04d}")
        make_fingerprints(Path(name), how, folders[-1], running)
    search = DuplicateSearch(FingerprintedDocuments(folders), config)
    pairs = search.pairs()
    write_packed(output, b"".join(lines_of(pairs, search.documents)))
    if config.save_fingerprints is None:
        shutil.rmtree(work, ignore_errors=True)
    return DuplicateReport(len(search.documents), search.candidates, search.verified, len(pairs))


def lines_of(
    pairs: dict[tuple[int, int], float], documents: FingerprintedDocuments
) -> Iterator[bytes]:
    """Yield pairs as lines, by the first document of each, in the order of the input."""
    others: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (first, second), value in pairs.items():
        others[first].append((second, value))
    for first in sorted(others):
        entries = [{documents.id_of(second): value} for second, value in sorted(others[first])]
        yield json_line({documents.id_of(first): entries})


class DuplicateSearch:
    """Search of the pairs of documents that are at or above the threshold."""

    def __init__(self, documents: FingerprintedDocuments, config: DuplicateConfig) -> None:
        self.documents = documents
        self.candidates = self.verified = 0
        self._config = config
        if documents.seeds % config.num_bands:
            raise ConfigError(
                f"--num-bands {config.num_bands} does not divide the {documents.seeds} values of "
                "the fingerprints of --load-fingerprints"
            )
        self._found: dict[tuple[int, int], float] = {}
        self._compared: set[tuple[int, int]] = set()

    def pairs(self) -> dict[tuple[int, int], float]:
        """Return the similarity by the numbers of two documents, the smaller one first."""
        width = self.documents.seeds // self._config.num_bands
        for band in range(self._config.num_bands):
            keys = _band_keys(self.documents.columns_DS(band * width, (band + 1) * width))
            for bucket in _buckets(keys):
                self._search(bucket)
            if sys.stderr.isatty():
                print(f"\rband {band + 1} of {self._config.num_bands}", end="", file=sys.stderr)
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        return self._found

    def _search(self, bucket: npt.NDArray[np.int64]) -> None:
        is_large = len(bucket) > _ALL_PAIRS
        rounds = 0
        while len(bucket) > 1 and not (is_large and 0 < rounds == self._config.heuristic_iter):
            first, rest = int(bucket[0]), bucket[1:]
            alike = self._compare(first, rest)
            bucket = rest[~alike] if is_large else rest
            rounds += 1

    def _compare(self, first: int, others: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        self.candidates += len(others)
        alike = np.zeros(len(others), bool)
        signature = self.documents.signatures_of(np.array([first]))
        for start in range(0, len(others), _ROWS_AT_A_TIME):
            some = others[start : start + _ROWS_AT_A_TIME]
            estimates = (self.documents.signatures_of(some) == signature).mean(axis=1)
            for index in np.flatnonzero(estimates >= self._least_estimate()):
                alike[start + index] = self._is_duplicate(first, int(some[index]))
        return alike

    def _least_estimate(self) -> float:
        if self._config.jaccard != "union":
            return 0.0  # the estimate is of Jaccard's, which may be small where these are large
        threshold = self._config.threshold
        deviation = (threshold * (1 - threshold) / self.documents.seeds) ** 0.5
        return threshold - _DEVIATIONS * deviation

    def _is_duplicate(self, first: int, second: int) -> bool:
        pair = (first, second)
        if pair not in self._compared:
            self._compared.add(pair)
            self.verified += 1
            a, b = self.documents.shingles_of(first), self.documents.shingles_of(second)
            value = similarity(a, b, self._config.jaccard)
            if value >= self._config.threshold:
                self._found[pair] = value
        return pair in self._found


def _band_keys(band_DR: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each row; equal rows have equal ones."""
    keys = np.zeros(len(band_DR), np.uint64)
    for column in range(band_DR.shape[1]):
        keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        keys += band_DR[:, column].astype(np.uint64) + np.uint64(1)
    return keys


def _buckets(keys: npt.NDArray[np.uint64]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield numbers of documents with equal keys, ascending, where there are several."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ends = np.concatenate((starts[1:], [len(keys)]))
    several = ends - starts > 1
    for start, end in zip(starts[several], ends[several], strict=True):
        yield order[start:end].astype(np.int64)


@dataclass(frozen=True)
class GroupConfig:
    """Grouping near-duplicates."""

    input: str | None = option(None)
    """The file that find_duplicates.py wrote."""
    output: str | None = option(None)
    """File of the groups: a line {"number": ["id", ...]} each."""
    threshold: float = option(0.7)
    """Minimum similarity of two documents in a group; not below the search's minimum."""


class GroupReport(NamedTuple):
    groups: int
    documents: int

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents in {self.groups:,} groups; "
            f"{self.documents - self.groups:,} of them can be removed"
        )


def group_duplicates(config: GroupConfig, running: LineJobConfig) -> GroupReport:
    """Write the connected components of the pairs. The ids of a group are in the order of the file,
    so that the first document comes first."""
    pairs, output = required(config, "input", "output")
    parents: dict[str, str] = {}

    def root_of(name: str) -> str:
        while parents.setdefault(name, name) != name:
            parents[name] = parents[parents[name]]
            name = parents[name]
        return name

    for first, second, value in read_pairs(Path(pairs)):
        if value >= config.threshold:
            older, newer = root_of(first), root_of(second)
            parents[newer] = older
    groups: dict[str, list[str]] = {}
    for name in list(parents):
        groups.setdefault(root_of(name), []).append(name)
    lines = [json_line({str(i): names}) for i, names in enumerate(groups.values())]
    write_packed(Path(output), b"".join(lines))
    return GroupReport(len(groups), len(parents))


def read_pairs(path: Path) -> Iterator[tuple[str, str, float]]:
    """Yield the pairs in a file of find_duplicates.py. Raises ValueError if a line has another
    form."""
    for record in read_records(path):
        try:
            for first, others in record.fields.items():
                for other in others:
                    for second, value in other.items():
                        yield first, second, float(value)
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f'{path}, line {record.number}: not {{"id": [{{"other id": similarity}}, ...]}}'
            ) from None


@dataclass(frozen=True)
class RemoveConfig:
    """Removing near-duplicates."""

    groups: str | None = option(None)
    """The file that group_duplicate_url.py wrote."""
    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output: str | None = option(None)
    """The JSON-lines file to write, compressed if its name ends in .gz or .zst."""
    removed: str | None = option(None)
    """A file for the documents left out."""
    id_key: str = option("url")
    """Key of the ids."""
    text_key: str = option("text")
    """Key of the text, to count the characters left out."""


def remove_duplicates(config: RemoveConfig, running: LineJobConfig) -> JobReport:
    """Write the documents, without all but the first of each group."""
    groups, inputs, output = required(config, "groups", "input", "output")
    ids: set[str] = set()
    for record in read_records(Path(groups)):
        for names in record.fields.values():
            if not isinstance(names, list):
                raise ValueError(f'{groups}, line {record.number}: not {{"number": ["id", ...]}}')
            ids.update(map(str, names[1:]))
    job = LineJob(
        "remove_group_duplicates",
        json_inputs(inputs),
        [Path(path) for path in (output, config.removed) if path],
        functools.partial(_remove_step, frozenset(ids), config.id_key, config.text_key),
        settings={"ids": sha256(json.dumps(sorted(ids))), "id_key": config.id_key},
    )
    return run(job, running)


def _remove_step(ids: frozenset[str], id_key: str, text_key: str) -> RecordStep:
    def step(record: JsonRecord, counts: Counter[str]) -> Iterator[tuple[int, bytes]]:
        if str(record.value(id_key)) in ids:
            counts["documents left out"] += 1
            counts["characters left out"] += len(record.fields.get(text_key) or "")
            yield 1, record.unchanged()
        else:
            counts["documents written"] += 1
            yield 0, record.unchanged()

    return step
