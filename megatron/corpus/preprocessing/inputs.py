"""Input files: which ones --input means, and their lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.corpus.preprocessing.unpack import naming_file, unpacked
from megatron.data.paths import expand

JSON_ENDINGS = (".jsonl", ".json")
PACKED_ENDINGS = (".gz", ".zst")
_BATCH_BYTES = 1 << 20


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
    wanted = tuple(ending + packed for ending in endings for packed in ("", *PACKED_ENDINGS))
    try:
        files = [path for pattern in patterns for path in expand(pattern, wanted)]
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--input {error}") from None
    return list(dict.fromkeys(files))


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
        with path.open("rb") as file, naming_file(path):
            lines: list[bytes] = []
            number, size = 1, 0
            for line in unpacked(file):
                lines.append(line)
                size += len(line)
                if len(lines) == max_lines or size >= _BATCH_BYTES:
                    yield LineBatch(path, number, lines, done + file.tell())
                    number, size, lines = number + len(lines), 0, []
            done += file.tell()
            if lines:
                yield LineBatch(path, number, lines, done)
