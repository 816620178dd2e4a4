"""Finds, checks and describes indexed datasets: their entries, token ids, checksums and lengths."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.data.indexed.dataset import IndexedDataset, bin_path, idx_path
from megatron.data.json_lines import READ_IN_PLACE, expand
from megatron.util.digests import sha256_of_file
from megatron.util.files import write_whole
from megatron.util.progress import progress_bar

_READ_BYTES = 1 << 24
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_BLOCK = 1 << 20
# Quantiles of longer arrays are those of this many entries, evenly spaced.
_EXACT_BELOW = 1 << 24
QUANTILES = (5, 25, 50, 75, 95)


def find_prefixes(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The prefixes of indexed datasets, in order; a folder is replaced by its own, sorted. Raises
    FileNotFoundError if a path does not exist, or one of two files is missing; ValueError if a
    folder has no indexed dataset."""
    prefixes: list[str] = []
    for path in (os.fspath(path) for path in paths):
        if not Path(path).is_dir():
            prefixes.append(path)
            continue
        endings = {".bin", ".idx"}
        stems = {file.with_suffix("") for file in Path(path).iterdir() if file.suffix in endings}
        if not stems:
            raise ValueError(f"the folder {path} has no .bin and .idx files")
        prefixes.extend(str(prefix) for prefix in sorted(stems))
    for prefix in prefixes:
        files = idx_path(prefix), bin_path(prefix)
        if not any(file.is_file() for file in files):
            raise FileNotFoundError(
                f"{prefix}: no such folder or indexed dataset, which is the prefix of a .bin and "
                "an .idx file"
            )
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"{file} does not exist; an indexed dataset is the prefix of a .bin and an "
                    ".idx file"
                )
    return prefixes


class CheckResult(NamedTuple):
    documents: int
    sequences: int
    tokens: int
    dtype: np.dtype
    largest_id: int | None
    """None without token ids."""
    checksums: str
    """"equal", "written" or "none"."""


def checksum_path(prefix: str | os.PathLike[str]) -> Path:
    """The checksums of a prefix: lines as `sha256sum` writes and checks them."""
    return Path(f"{os.fspath(prefix)}.sha256")


def check_dataset(
    prefix: str, vocab_size: int | None = None, *, write: bool = False
) -> CheckResult:
    """Read all of a dataset once and check it, also that token ids are below `vocab_size`, if
    given. With `write`, write the file of checksums instead of comparing. Raises ValueError if
    something is damaged; OSError if a file is missing or cannot be read or written."""
    dataset = IndexedDataset(prefix)
    dataset.verify()
    sums = {idx_path(prefix).name: sha256_of_file(idx_path(prefix))}
    extremes, sums[bin_path(prefix).name] = _read_tokens(dataset)
    # Checksums first: they say more about a damaged .bin than an id that is out of range.
    known = {} if write else read_checksums(prefix)
    for name in sorted(known):
        if known[name] != sums[name]:
            raise ValueError(
                f"{Path(prefix).parent / name} has the SHA-256 {sums[name]}, but "
                f"{checksum_path(prefix)} says {known[name]}: the file was damaged or replaced "
                "since; copy it again, or write new checksums (--write-checksums) if the new "
                "content is right"
            )
    if extremes is not None:
        dataset.check_ids(extremes, vocab_size)
    if write:
        lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
        write_whole(checksum_path(prefix), lines.encode())
    return CheckResult(
        dataset.num_documents,
        len(dataset),
        dataset.num_tokens,
        dataset.dtype,
        None if extremes is None else int(extremes[1, 0]),
        "written" if write else "equal" if known else "none",
    )


class TokenExtremes:
    """The smallest and largest of token ids that come in blocks, each with its position."""

    def __init__(self) -> None:
        self._smallest: list[int] = []
        self._largest: list[int] = []

    def add(self, start: int, tokens: np.ndarray) -> None:
        """A block, not empty, that starts at a position in the .bin."""
        low, high = int(tokens.argmin()), int(tokens.argmax())
        if not self._smallest or tokens[low] < self._smallest[0]:
            self._smallest = [int(tokens[low]), start + low]
        if not self._largest or tokens[high] > self._largest[0]:
            self._largest = [int(tokens[high]), start + high]

    def array(self) -> np.ndarray:
        """int64[2, 2], (id, position) of both; zeros without a block."""
        return np.array([self._smallest or [0, 0], self._largest or [0, 0]], np.int64)


def read_checksums(prefix: str | os.PathLike[str]) -> Mapping[str, str]:
    """SHA-256 by file name; empty without a file of checksums. Raises ValueError if the file is
    malformed, or not of this dataset; OSError if it cannot be read."""
    path = checksum_path(prefix)
    if not path.exists():
        return {}
    sums = {}
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if not match:
            raise ValueError(
                f"{path}, line {number}: expected a checksum and a file name, not {line[:80]!r}"
            )
        sums[match[2]] = match[1]
    expected = {bin_path(prefix).name, idx_path(prefix).name}
    if set(sums) != expected:
        raise ValueError(
            f"{path} has checksums of {', '.join(sorted(sums)) or 'nothing'}, not of "
            + " and ".join(sorted(expected))
        )
    return sums


def verify_checksums(paths: Sequence[str], rank: int = 0, processes: int = 1) -> None:
    """Compare this process's share of the files of data paths with the checksums next to them:
    PREFIX.sha256, or FILE.sha256 of a file that is not indexed. Raises ValueError if one is missing
    or differs, or a path is a URL; OSError if a file cannot be read."""
    known = [digest for path in dict.fromkeys(paths) for digest in _checksums(path)]
    sizes = {path: path.stat().st_size for path, _ in known}
    shares: list[list[tuple[Path, str]]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for path, wanted in sorted(known, key=lambda pair: -sizes[pair[0]]):
        least = loads.index(min(loads))
        loads[least] += sizes[path]
        shares[least].append((path, wanted))
    with progress_bar("verifying the data", total=loads[rank]) as bar:
        for path, wanted in shares[rank]:
            digest = sha256_of_file(path, bar.update)
            if digest != wanted:
                raise ValueError(
                    f"--verify-data: {path} has the SHA-256 {digest}, but the .sha256 file next to "
                    f"it says {wanted}: the file was damaged or replaced since; copy it again"
                )


def _checksums(path: str) -> list[tuple[Path, str]]:
    """The files of a data path and their checksums."""
    if "://" in path:
        raise ValueError(
            f"--verify-data: {path} is remote, and only files here have checksums next to them; "
            "leave the flag out, or copy the data here"
        )
    if idx_path(path).is_file():
        sums = read_checksums(path)
        if not sums:
            raise ValueError(
                f"--verify-data: {checksum_path(path)} does not exist; tools/verify_data.py "
                f"{path} --write-checksums writes it"
            )
        return [(file, sums[file.name]) for file in (bin_path(path), idx_path(path))]
    return [(file, _checksum_of(file)) for file in expand(path, READ_IN_PLACE)]


def _checksum_of(file: Path) -> str:
    sums = Path(f"{file}.sha256")
    if not sums.is_file():
        raise ValueError(f"--verify-data: {sums} does not exist; sha256sum writes such a file")
    for line in sums.read_bytes().decode("utf-8", "replace").splitlines():
        match = _LINE.fullmatch(line)
        if match and Path(match[2]).name == file.name:
            return match[1]
    raise ValueError(f"--verify-data: {sums} has no checksum of {file.name}")


def _read_tokens(dataset: IndexedDataset) -> tuple[np.ndarray | None, str]:
    """`TokenExtremes.array`, None without token ids, and the SHA-256 of the .bin."""
    digest, extremes, position = hashlib.sha256(), TokenExtremes(), 0
    integers = dataset.dtype.kind in "iu"
    path = bin_path(dataset.prefix)
    bar = progress_bar(f"reading {path}", total=path.stat().st_size)
    with bar, path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            bar.update(len(block))
            if integers:
                tokens = np.frombuffer(block, dataset.dtype)
                extremes.add(position, tokens)
                position += len(tokens)
    largest = extremes.array() if integers and position else None
    return largest, digest.hexdigest()


def contents(dataset: IndexedDataset) -> dict[str, Any]:
    """Counts, sizes and statistics of lengths as JSON values, from the .idx alone. Raises
    ValueError if the .idx is damaged."""
    dataset.verify()
    bounds, size = dataset.document_indices, dataset.dtype.itemsize
    end = np.int64(dataset.num_tokens * size)

    def bytes_before(sequences: np.ndarray) -> np.ndarray:
        inside = sequences < len(dataset)  # the last document ends after the last sequence
        starts = np.full(len(sequences), end)
        starts[inside] = dataset.sequence_offsets[sequences[inside]]
        return starts

    blocks = [bounds[i : i + _BLOCK + 1] for i in range(0, dataset.num_documents, _BLOCK)]
    lengths = dataset.sequence_lengths
    return {
        "prefix": dataset.prefix,
        "documents": dataset.num_documents,
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bin_bytes": bin_path(dataset.prefix).stat().st_size,
        "idx_bytes": idx_path(dataset.prefix).stat().st_size,
        "multimodal": dataset.modes is not None,
        "tokens_per_sequence": _statistics(
            len(dataset), (lengths[i : i + _BLOCK] for i in range(0, len(dataset), _BLOCK))
        ),
        "tokens_per_document": _statistics(
            dataset.num_documents, (np.diff(bytes_before(block)) // size for block in blocks)
        ),
        "sequences_per_document": _statistics(dataset.num_documents, map(np.diff, blocks)),
    }


def _statistics(count: int, blocks: Iterable[np.ndarray]) -> dict[str, Any]:
    """Statistics of `count` lengths that come in blocks; quantiles are those of a sample."""
    step = -(-count // _EXACT_BELOW) or 1
    sample, of_blocks, seen = [], [], 0
    for values in blocks:
        sample.append(values[-seen % step :: step].astype(np.int64))
        empty = int(np.count_nonzero(values == 0))
        total = int(values.sum(dtype=np.int64))
        of_blocks.append((total, empty, int(values.min()), int(values.max())))
        seen += len(values)
    totals, empties, smallest, largest = zip(*of_blocks or [(0, 0, 0, 0)], strict=True)
    percentiles = np.percentile(
        np.concatenate(sample or [np.zeros(1, np.int64)]), QUANTILES, method="inverted_cdf"
    )
    return {
        "count": count,
        "total": sum(totals),
        "smallest": min(smallest),
        "largest": max(largest),
        "empty": sum(empties),
        "mean": sum(totals) / count if count else 0.0,
        "quantiles": {f"{q}%": int(v) for q, v in zip(QUANTILES, percentiles, strict=True)},
    }
