"""Input files as batches of lines: globs, folders, gzip and zstd, line numbers, position."""

from __future__ import annotations

import glob
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

JSON_ENDINGS = (".jsonl", ".json")
_PACKED = (".gz", ".zst")
_BATCH_BYTES = 1 << 20
_BUFFER = 1 << 20


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file."""

    path: Path
    first_line: int
    """Number of the first line, counted from 1."""
    lines: list[bytes]
    position: int
    """Bytes of all input files, as they are on disk, read up to here."""


def expand_inputs(patterns: Sequence[str], endings: Sequence[str]) -> list[Path]:
    """Files of paths, globs and folders, in the given order, each once.

    What one glob or folder stands for is sorted by name. Of a folder, the files at any depth with
    one of `endings`, also with .gz or .zst after it, are meant.

    Raises:
        FileNotFoundError: a pattern stands for no file; the message names it.
    """
    wanted = tuple(ending + packed for ending in endings for packed in ("", *_PACKED))
    files: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).is_dir():
            found = sorted(path for path in Path(pattern).rglob("*") if path.name.endswith(wanted))
            missing = (
                f"--input {pattern} is a folder without files *{' *'.join(endings)} (.gz .zst)"
            )
        elif Path(pattern).exists():
            found, missing = [Path(pattern)], ""
        else:
            found = sorted(map(Path, glob.glob(pattern, recursive=True)))
            is_glob = glob.escape(pattern) != pattern
            missing = f"--input {pattern} {'matches no file' if is_glob else 'does not exist'}"
        found = [path for path in found if not path.is_dir()]
        if not found:
            raise FileNotFoundError(missing)
        files.update(dict.fromkeys(found))
    return list(files)


def total_bytes(paths: Sequence[Path]) -> int:
    """Size of all files on disk."""
    return sum(path.stat().st_size for path in paths)


def read_batches(paths: Sequence[Path], max_lines: int) -> Iterator[LineBatch]:
    """All lines of all files, `max_lines` or about 1 MiB at a time.

    Raises:
        ValueError: a packed file is damaged or cut short; the message names it.
    """
    done = 0
    for path in paths:
        with path.open("rb") as file, _naming(path):
            lines: list[bytes] = []
            number, size = 1, 0
            for line in _unpacked(file):
                lines.append(line)
                size += len(line)
                if len(lines) == max_lines or size >= _BATCH_BYTES:
                    yield LineBatch(path, number, lines, done + file.tell())
                    number, size, lines = number + len(lines), 0, []
            done += file.tell()
            if lines:
                yield LineBatch(path, number, lines, done)


def _unpacked(file: BinaryIO) -> io.BufferedReader:
    """By its first bytes, not its name: gzip, zstd, or plain without its byte-order mark."""
    head = file.read(4)
    file.seek(0)
    if head[:2] == b"\x1f\x8b":
        packed: io.BufferedIOBase = gzip.GzipFile(fileobj=file)
        return io.BufferedReader(packed, _BUFFER)  # type: ignore[arg-type,type-var]
    is_skippable_frame = head[1:] == b"\x2a\x4d\x18" and head[:1] >= b"\x50"
    if head == b"\x28\xb5\x2f\xfd" or is_skippable_frame:
        return io.BufferedReader(_ZstdStream(file), _BUFFER)
    if head[:3] == b"\xef\xbb\xbf":
        file.seek(3)
    assert isinstance(file, io.BufferedReader)
    return file


class _ZstdStream(io.RawIOBase):
    """Unpacked zstd frames. zstandard's own reader takes a file cut short for a whole one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._is_between_frames = True
        self._packed = self._unpacked = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def,override]
        while not self._unpacked:
            self._packed = self._packed or self._file.read(_BUFFER)
            if not self._packed:
                if not self._is_between_frames:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._unpacked = self._frame.decompress(self._packed)
            self._is_between_frames = self._frame.eof
            self._packed = self._frame.unused_data if self._frame.eof else b""
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The errors of unpacking do not know their file: name it."""
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
        raise ValueError(f"--input {path} is damaged or cut short: {error}") from error
