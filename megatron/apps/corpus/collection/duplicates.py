"""Search for near-duplicates by MinHash and locality-sensitive hashing, and their grouping and
removal.

A document's signature is divided into bands. Two documents with an equal band are candidates. With
b bands of r values, documents of Jaccard similarity J are candidates with probability 1 - (1 -
J^r)^b (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, section 3.4). Candidates with
similar signatures are compared shingle by shingle, so the reported similarities are exact.
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

_ALL_PAIRS = 50  # size of the largest bucket in which all pairs are compared
# standard deviations below the threshold down to which estimated similarities are verified
_DEVIATIONS = 4.0
_ROWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True)
class DuplicateConfig:
    """Options for finding near-duplicates."""

    inputs: tuple[str, ...] = option((), aliases=("--input",))
    """JSON-lines files, plain or compressed, each followed by the key of its document ids, for
    example cc.json cc_id news.json url."""
    output: str | None = option(None)
    """File for the near-duplicates, with lines {"id": [{"other id": similarity}, ...]}."""
    text_key: str = option("text")
    """Key of the text in each record."""
    threshold: float = option(0.7)
    """Minimum similarity of two documents that count as near-duplicates."""
    jaccard: str = option("union", choices=("union", "min", "max"))
    """Denominator of the similarity, by which the number of shared shingles is divided: the size of
    the union, of the smaller set, or of the larger set."""
    num_seeds: int = option(252)
    """Number of values in a MinHash signature."""
    num_bands: int = option(42)
    """Number of bands into which a signature is divided. --num-seeds must be a multiple of it."""
    heuristic_iter: int = option(-1)
    """Maximum number of comparison rounds in a large bucket; -1 means no limit. Each round compares
    one document with all others and removes the similar ones from the bucket."""
    save_fingerprints: str | None = option(None)
    """Folder in which to keep the fingerprints of --inputs for later runs."""
    load_fingerprints: tuple[str, ...] = option(())
    """Folders written by --save-fingerprints, to compare with --inputs. Their documents come before
    those of --inputs."""
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
    candidates: int  # number of pairs whose signatures share a band
    verified: int  # number of candidates that were compared shingle by shingle
    pairs: int  # number of pairs at or above the threshold

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.candidates:,} candidate pairs, "
            f"{self.verified:,} compared in full, {self.pairs:,} pairs of near-duplicates"
        )


def find_duplicates(config: DuplicateConfig, running: LineJobConfig) -> DuplicateReport:
    """Write the pairs of near-duplicates, reusing an interrupted run's fingerprints."""
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
    """Yield the output lines, one for each document that is first in a pair, in input order."""
    others: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (first, second), value in pairs.items():
        others[first].append((second, value))
    for first in sorted(others):
        entries = [{documents.id_of(second): value} for second, value in sorted(others[first])]
        yield json_line({documents.id_of(first): entries})


class DuplicateSearch:
    """Search for all pairs of documents whose similarity reaches the threshold."""

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
        """Return the similarity of each pair of near-duplicates, keyed by document numbers, the
        smaller one first."""
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
            # the signatures estimate Jaccard similarity, which may be far below min or max
            return 0.0
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
    """Return a 64-bit key for each row. Equal rows have equal keys."""
    keys = np.zeros(len(band_DR), np.uint64)
    for column in range(band_DR.shape[1]):
        keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        keys += band_DR[:, column].astype(np.uint64) + np.uint64(1)
    return keys


def _buckets(keys: npt.NDArray[np.uint64]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield, for each key that several documents share, their numbers in ascending order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ends = np.concatenate((starts[1:], [len(keys)]))
    several = ends - starts > 1
    for start, end in zip(starts[several], ends[several], strict=True):
        yield order[start:end].astype(np.int64)


@dataclass(frozen=True)
class GroupConfig:
    """Options for grouping near-duplicates."""

    input: str | None = option(None)
    """File written by find_duplicates.py."""
    output: str | None = option(None)
    """File for the groups, with lines {"number": ["id", ...]}."""
    threshold: float = option(0.7)
    """Minimum similarity of two documents to be grouped. The search's threshold applies, too."""


class GroupReport(NamedTuple):
    groups: int
    documents: int

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents in {self.groups:,} groups; "
            f"{self.documents - self.groups:,} of them can be removed"
        )


def group_duplicates(config: GroupConfig, running: LineJobConfig) -> GroupReport:
    """Write the connected components of the pairs as groups. The ids in a group are in the order of
    the input file, so that the group's first document comes first."""
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
    """Yield the pairs in a file that find_duplicates.py wrote, with their similarity. Raises
    ValueError if a line is malformed."""
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
    """Options for removing near-duplicates."""

    groups: str | None = option(None)
    """File written by group_duplicate_url.py."""
    input: tuple[str, ...] = option(())
    """JSON-lines files, globs or folders, plain or compressed with gzip or zstd."""
    output: str | None = option(None)
    """JSON-lines file to write, compressed if its name ends in .gz or .zst."""
    removed: str | None = option(None)
    """File for the documents that are removed."""
    id_key: str = option("url")
    """Key of the document id in each record."""
    text_key: str = option("text")
    """Key of the text. It is only used to count the characters of removed documents."""


def remove_duplicates(config: RemoveConfig, running: LineJobConfig) -> JobReport:
    """Write all documents except those that come after the first of their group."""
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
