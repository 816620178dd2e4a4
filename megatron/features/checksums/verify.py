"""Checksums stored next to data files: ``PREFIX.sha256`` for an indexed dataset, ``FILE.sha256``
for any other file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.data.corpora import READ_IN_PLACE, expand
from megatron.data.indexed import bin_path, idx_path
from megatron.util.digests import sha256_of_file
from megatron.util.progress import progress_bar

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def checksum_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the checksum file for a data prefix. Its lines have the format of
    `sha256sum`."""
    return Path(f"{os.fspath(prefix)}.sha256")


def read_checksums(prefix: str | os.PathLike[str]) -> Mapping[str, str]:
    """Return the SHA-256 of each file by file name, or an empty mapping if there is no checksum
    file. Raises ValueError if the checksum file is malformed or belongs to another dataset, and
    OSError if it cannot be read."""
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
    """Compare this process's share of the data files with their checksums in PREFIX.sha256, or in
    FILE.sha256 for files that are not indexed. Raises ValueError if a checksum is missing or
    differs, or if a path is a URL, and OSError if a file cannot be read."""
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
    """Return the files at a data path, each with its expected checksum."""
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
