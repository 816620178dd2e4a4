"""The input: which files, what they contain, how they are compressed, and partitions of them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from gzip import BadGzipFile
from pathlib import Path
from typing import Any, BinaryIO

from xopen import xopen

from megatron.apps.corpus.preprocessing.config import STDIN, PreprocessConfig
from megatron.config import ConfigError
from megatron.data.json_lines import BYTE_ORDER_MARK, LONGEST_RECORD, expand

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError
else:
    from backports.zstd import ZstdError
try:  # xopen decompresses gzip with isal, where that is made for the processor
    from isal.isal_zlib import error as gzip_error
except ImportError:
    from zlib import error as gzip_error  # type: ignore[assignment]

JSON_ENDINGS = (".jsonl", ".json")
PACKED_ENDINGS = (".gz", ".zst")
_BATCH_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_UNPACKING_ERRORS: Any = (BadGzipFile, gzip_error, ZstdError, EOFError)


class Form(Enum):
    """How a file contains its documents; the value is what messages call one of its records."""

    LINES = "line"
    ARRAY = "item"
    TEXT = "document"
    PARAGRAPHS = "paragraph"
    PARQUET = "row"


@dataclass(frozen=True)
class InputFile:
    """An input file, or the part of one that a partition reads."""

    path: Path | None
    """None: the standard input."""
    form: Form
    size: int
    """Bytes on disk."""
    mtime_ns: int
    is_packed: bool
    start: int = 0
    stop: int | None = None
    """The lines that begin from byte `start` up to byte `stop` are read (None: to the end)."""

    @property
    def name(self) -> str:
        return "the standard input" if self.path is None else str(self.path)

    @property
    def is_divisible(self) -> bool:
        """Whether a worker can start to read anywhere in it."""
        return self.form is Form.LINES and not self.is_packed and self.path is not None

    @property
    def bytes_to_read(self) -> int:
        return (self.size if self.stop is None else self.stop) - self.start


def find_inputs(config: PreprocessConfig) -> list[InputFile]:
    """The files of --input, in order, each once. Raises FileNotFoundError; ConfigError for a .txt
    file, which has one text, with several --json-keys."""
    found: dict[Path | None, None] = {}
    for pattern in config.input:
        found.update(dict.fromkeys([None] if pattern == STDIN else _paths(pattern, config)))
    inputs = [_input_file(path, config) for path in found]
    for file in inputs:
        if file.form in (Form.TEXT, Form.PARAGRAPHS) and len(config.json_keys) > 1:
            raise ConfigError(
                f"--input {file.name} is plain text, with one text per document: --json-keys "
                f"{' '.join(config.json_keys)} names several"
            )
    return inputs


def partition(inputs: Sequence[InputFile], rank: int, count: int) -> Iterator[InputFile]:
    """Part `rank` of `count`, equal in bytes on disk as far as files can be divided. Plain JSON
    lines are cut at a line; another file belongs to the part in which it starts."""
    total = sum(file.size for file in inputs)
    first, last = total * rank // count, total * (rank + 1) // count
    begin = 0
    for file in inputs:
        start, stop = max(first - begin, 0), min(last - begin, file.size)
        if file.is_divisible:
            if start < stop:
                yield replace(file, start=start, stop=stop)
        elif first <= begin < last or (rank == count - 1 and begin == last):
            yield file
        begin += file.size


def _paths(pattern: str, config: PreprocessConfig) -> list[Path]:
    tables = (*JSON_ENDINGS, ".parquet")
    endings = {
        "jsonl": JSON_ENDINGS,
        "json": JSON_ENDINGS,
        "txt": (".txt",),
        "parquet": (".parquet",),
    }.get(config.input_format)
    if endings is not None:
        return expand_inputs([pattern], endings)
    try:  # a folder of JSON lines often has a README.txt or LICENSE.txt beside them
        return expand_inputs([pattern], tables)
    except FileNotFoundError:
        return expand_inputs([pattern], (*tables, ".txt"))


def _input_file(path: Path | None, config: PreprocessConfig) -> InputFile:
    if path is None:
        return InputFile(None, _form("", config), 0, 0, is_packed=False)
    status = os.stat(path)
    with opened(path) as file:
        head = file.read(4)
        form = _form(path.name.removesuffix(".gz").removesuffix(".zst"), config)
        if form is Form.ARRAY and config.input_format == "auto":
            file.seek(0)
            with naming_file(path):
                if not unpacked(file).read(1 << 16).lstrip().startswith(b"["):
                    form = Form.LINES
    return InputFile(path, form, status.st_size, status.st_mtime_ns, compression(head) is not None)


def _form(name: str, config: PreprocessConfig) -> Form:
    wanted = config.input_format
    if wanted == "parquet" or (wanted == "auto" and name.endswith(".parquet")):
        return Form.PARQUET
    if wanted == "txt" or (wanted == "auto" and name.endswith(".txt")):
        return Form.TEXT if config.txt_documents == "file" else Form.PARAGRAPHS
    if wanted == "json" or (wanted == "auto" and name.endswith(".json")):
        return Form.ARRAY
    return Form.LINES


def expand_inputs(patterns: Sequence[str], endings: Sequence[str]) -> list[Path]:
    """Files of paths, globs and folders, in the given order, each once; those of a glob or folder
    sorted by name. Of a folder, the files at any depth with one of `endings` are meant, also with
    .gz or .zst after it. Raises FileNotFoundError if a pattern matches no file."""
    wanted = tuple(ending + packed for ending in endings for packed in ("", *PACKED_ENDINGS))
    try:
        files = [path for pattern in patterns for path in expand(pattern, wanted)]
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--input {error}") from None
    return list(dict.fromkeys(files))


def total_bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@dataclass(frozen=True)
class LineBatch:
    path: Path
    first_line: int
    """Number of the first line, counted from 1."""
    lines: list[bytes]
    position: int
    """Bytes of all input files, on disk, read up to here."""


def read_batches(paths: Sequence[Path], max_lines: int) -> Iterator[LineBatch]:
    """All lines of all files, `max_lines` or about 1 MiB at a time. A line for which `long_line`
    has an error is cut; its rest is skipped, so that a small packed file does not fill the memory.
    Raises ValueError if a compressed file is damaged or truncated."""
    done = 0
    for path in paths:
        with path.open("rb") as file, naming_file(path):
            lines: list[bytes] = []
            number, size = 1, 0
            stream = unpacked(file)
            while line := stream.readline(LONGEST_RECORD + 2):
                if len(line) > LONGEST_RECORD:
                    _skip_rest(stream, line)
                lines.append(line)
                size += len(line)
                if len(lines) == max_lines or size >= _BATCH_BYTES:
                    yield LineBatch(path, number, lines, done + file.tell())
                    number, size, lines = number + len(lines), 0, []
            done += file.tell()
            if lines:
                yield LineBatch(path, number, lines, done)


def _skip_rest(stream: io.BufferedReader, line: bytes) -> None:
    """Reads on to the end of a line whose beginning was read."""
    while line and not line.endswith(b"\n"):
        line = stream.readline(_BATCH_BYTES)


@contextmanager
def opened(path: Path | None) -> Iterator[BinaryIO]:
    """A file to read; None is the standard input."""
    if path is None:
        yield sys.stdin.buffer
    else:
        with path.open("rb") as file:
            yield file


def compression(head: bytes) -> str | None:
    """ "gz", "zst" or None, by the first four bytes of a file."""
    is_skippable_frame = head[1:4] == b"\x2a\x4d\x18" and head[:1] >= b"\x50"
    if head == b"\x28\xb5\x2f\xfd" or is_skippable_frame:
        return "zst"
    return "gz" if head[:2] == b"\x1f\x8b" else None


def unpacked(file: BinaryIO) -> io.BufferedReader:
    """The content, decompressed by the file's first bytes, not its name; a byte-order mark is left
    out. Reading raises what `naming_file` turns into a ValueError."""
    assert isinstance(file, io.BufferedReader)
    stream = file
    if kind := compression(file.peek(4)[:4]):
        # In this thread: decompression is a small part of the work, and programs hide errors.
        content = xopen(file, "rb", format=kind, threads=0)
        stream = io.BufferedReader(content, _BUFFER_BYTES)
    if stream.peek(3)[:3] == BYTE_ORDER_MARK:
        stream.read(3)
    return stream


@contextmanager
def naming_file(name: object) -> Iterator[None]:
    """Names the file in errors of decompression, raised as ValueError."""
    try:
        yield
    except _UNPACKING_ERRORS as error:
        raise ValueError(f"--input {name} is damaged or cut short: {error}") from error
