"""Whether an indexed dataset is whole: its entries, its token ids, its checksums."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed.reader import IndexedDataset, bin_path, idx_path
from megatron.util.digests import sha256_of_file
from megatron.util.files import write_whole
from megatron.util.progress import progress_bar

_BLOCK = 1 << 24
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


@dataclass(frozen=True)
class Checked:
    """A dataset that is whole."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: np.dtype
    largest_id: int | None
    """None where there are no token ids."""
    checksums: str
    """What became of them: "equal", "written" or "none"."""


def checksum_path(prefix: str | os.PathLike[str]) -> Path:
    """The checksums of a prefix: lines as `sha256sum` writes and checks them."""
    return Path(f"{os.fspath(prefix)}.sha256")


def check_dataset(prefix: str, vocab_size: int | None = None, *, write: bool = False) -> Checked:
    """Read all of a dataset once and check it.

    Args:
        vocab_size: token ids must be below it; None checks only that none is negative.
        write: (re)write the file of checksums, if the dataset is whole, instead of comparing.

    Raises:
        ValueError: something is damaged; the message names the file.
        OSError: a file is missing or cannot be read or written.
    """
    dataset = IndexedDataset(prefix)
    dataset.verify()
    sums = {idx_path(prefix).name: sha256_of_file(idx_path(prefix))}
    extremes, sums[bin_path(prefix).name] = _read_tokens(dataset)
    # Checksums first: of a damaged .bin, an id that is out of range says less.
    known = {} if write else read_checksums(prefix)
    for name in sorted(known):
        if known[name] != sums[name]:
            raise ValueError(
                f"{Path(prefix).parent / name} has the SHA-256 {sums[name]}, but "
                f"{checksum_path(prefix)} says {known[name]}: the file was damaged or replaced "
                "since; copy it again, or write the checksums anew (--write-checksums) if the new "
                "content is right"
            )
    if extremes is not None:
        dataset.check_ids(extremes, vocab_size)
    if write:
        _write_checksums(prefix, sums)
    return Checked(
        prefix,
        dataset.num_documents,
        len(dataset),
        dataset.num_tokens,
        dataset.dtype,
        None if extremes is None else int(extremes[1, 0]),
        "written" if write else "equal" if known else "none",
    )


class Extremes:
    """Smallest and largest of token ids that come in blocks, each with its position."""

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
        """int64[2, 2]; zeros when there was no block."""
        return np.array([self._smallest or [0, 0], self._largest or [0, 0]], np.int64)


def read_checksums(prefix: str | os.PathLike[str]) -> Mapping[str, str]:
    """SHA-256 by file name; empty when there is no file of checksums.

    Raises:
        ValueError: the file is none, or not of this dataset.
        OSError: it cannot be read.
    """
    path = checksum_path(prefix)
    if not path.exists():
        return {}
    sums = {}
    for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if not match:
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is no checksum and file name")
        sums[match[2]] = match[1]
    expected = {bin_path(prefix).name, idx_path(prefix).name}
    if set(sums) != expected:
        raise ValueError(
            f"{path} has checksums of {', '.join(sorted(sums)) or 'nothing'}, not of "
            + " and ".join(sorted(expected))
        )
    return sums


def _write_checksums(prefix: str, sums: Mapping[str, str]) -> None:
    lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    write_whole(checksum_path(prefix), lines.encode())


def _read_tokens(dataset: IndexedDataset) -> tuple[np.ndarray | None, str]:
    """Extremes of the token ids, None where there are none, and the SHA-256 of the .bin."""
    digest, extremes, position = hashlib.sha256(), Extremes(), 0
    integers = dataset.dtype.kind in "iu"
    path = bin_path(dataset.prefix)
    bar = progress_bar(f"reading {path}", total=path.stat().st_size)
    with bar, path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            bar.update(len(block))
            if integers:
                tokens = np.frombuffer(block, dataset.dtype)
                extremes.add(position, tokens)
                position += len(tokens)
    found = extremes.array() if integers and position else None
    return found, digest.hexdigest()
