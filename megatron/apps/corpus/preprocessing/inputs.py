"""The input of preprocessing: flags, files with their format and compression, and partitions."""

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

from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.data.corpora import expand
from megatron.features.raw_text.records import BYTE_ORDER_MARK, LONGEST_RECORD

STDIN = "-"


@dataclass(frozen=True)
class PreprocessConfig:
    """Options for preprocessing text into documents."""

    input: tuple[str, ...] = option(())
    """Files, globs or folders, read in this order; - is the standard input. Accepted are JSON
    lines, .json files with one array, .txt and .parquet; all but Parquet may be compressed with
    gzip or zstd. A folder stands for all *.jsonl, *.json and *.parquet below it, or else all
    *.txt."""
    input_format: str = option("auto", choices=("auto", "jsonl", "json", "txt", "parquet"))
    """Format of the files. auto chooses by file name; unknown names mean JSON lines."""
    txt_documents: str = option("file", choices=("file", "blank-line"))
    """Document unit in a .txt file: the whole file, or the text between blank lines."""
    json_keys: tuple[str, ...] = option(("text",), aliases=("--json-key", "--jsonl-keys"))
    """Keys of the texts (in Parquet files, columns). Each key becomes a separate dataset."""
    output_prefix: str | None = option(None)
    """PREFIX of the files PREFIX_KEY_document.bin and .idx (PREFIX_KEY_sentence with
    --split-sentences). The folder PREFIX.preprocessing contains unfinished work."""
    append_eod: bool = option(False)
    """End each document with the tokenizer's end-of-document token."""
    split_sentences: bool = option(False)
    """Make each sentence a separate sequence (BERT, T5)."""
    sentence_splitter: str = option("auto", choices=("auto", "punkt", "rules"))
    """Sentence splitting method: NLTK's punkt, a few rules, or auto, which is punkt if its data is
    installed and the rules otherwise."""
    lang: str = option("english")
    """Language of the text, for --split-sentences."""
    keep_newlines: bool = option(False)
    """Keep line breaks between sentences, at the end of the preceding sentence."""
    on_bad_line: str = option("error", choices=("error", "skip"))
    """Handling of malformed lines: error stops the run; skip leaves them out and reports them."""
    max_line_bytes: int = option(1 << 26)
    """Maximum size of a line, or of a document in a .txt file, in bytes. Longer ones count as
    malformed and are not read into memory."""
    workers: int | None = option(None, derived="number of processors that this process may use")
    """Number of processes that tokenize."""
    partitions: int = option(1)
    """Number of partitions of the input. They are processed in parallel, each by a share of the
    workers, and then joined. The output does not depend on this number."""
    partition_rank: int | None = option(None)
    """Process only this one of the --partitions, counted from 0, for example on another machine.
    The command without this flag processes the remaining partitions and joins all of them."""
    log_interval: int = option(1000)
    """Number of documents between progress lines, which appear at most once per second."""
    dataset_impl: str = option("mmap", choices=("mmap", "lazy", "cached"))
    """Format of the output. All values write mmap."""
    chunk_size: int | None = option(None, note="work is handed out by bytes, not lines")
    """Number of lines handed to a worker at a time."""
    keep_sequential_samples: bool = option(False, note="the input's order is always kept")
    """Keep the order of the input."""

    def check(self) -> None:
        """Check the flags. Raises ConfigError if one is missing or out of range."""
        if not self.input:
            raise ConfigError("--input is missing: the files to read")
        if not self.output_prefix:
            raise ConfigError("--output-prefix is missing: the files PREFIX_KEY_document.bin/.idx")
        if not self.split_sentences and (self.keep_newlines or self.sentence_splitter != "auto"):
            flag = "--keep-newlines" if self.keep_newlines else "--sentence-splitter"
            raise ConfigError(f"{flag} would change nothing without --split-sentences")
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError(f"--json-keys {' '.join(self.json_keys)} names a key twice")
        for flag, value in (
            ("--workers", self.workers),
            ("--partitions", self.partitions),
            ("--max-line-bytes", self.max_line_bytes),
            ("--log-interval", self.log_interval),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value} must be 1 or more")
        self._check_partitions()

    def _check_partitions(self) -> None:
        rank = self.partition_rank
        if rank is not None and not 0 <= rank < self.partitions:
            raise ConfigError(
                f"--partition-rank {rank} is not one of the --partitions {self.partitions}, "
                f"which are 0 to {self.partitions - 1}"
            )
        if STDIN in self.input and self.partitions > 1:
            raise ConfigError(
                f"--partitions {self.partitions} cannot divide the standard input (--input -)"
            )


if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError
else:
    from backports.zstd import ZstdError
try:  # xopen decompresses gzip with isal where isal is available
    from isal.isal_zlib import error as gzip_error
except ImportError:
    from zlib import error as gzip_error  # type: ignore[assignment]

JSON_ENDINGS = (".jsonl", ".json")
PACKED_ENDINGS = (".gz", ".zst")
_BATCH_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_UNPACKING_ERRORS: Any = (BadGzipFile, gzip_error, ZstdError, EOFError)


class Form(Enum):
    """Format of the documents in a file. The value is the word for one record in messages."""

    LINES = "line"
    ARRAY = "item"
    TEXT = "document"
    PARAGRAPHS = "paragraph"
    PARQUET = "row"


@dataclass(frozen=True)
class InputFile:
    """An input file, or the byte range of a file that a partition reads."""

    path: Path | None  # None means the standard input
    form: Form
    size: int  # bytes on disk
    mtime_ns: int
    is_packed: bool
    start: int = 0
    stop: int | None = None
    """End of the byte range: lines that begin at or after byte `start` and before byte `stop` are
    read. None means the end of the file."""

    @property
    def name(self) -> str:
        return "the standard input" if self.path is None else str(self.path)

    @property
    def is_divisible(self) -> bool:
        """True if a worker can start reading anywhere in the file."""
        return self.form is Form.LINES and not self.is_packed and self.path is not None

    @property
    def bytes_to_read(self) -> int:
        return (self.size if self.stop is None else self.stop) - self.start


def find_inputs(config: PreprocessConfig) -> list[InputFile]:
    """Return the files of --input in order, without repetitions. Raises FileNotFoundError if a file
    is missing, and ConfigError if there is a .txt file and several --json-keys."""
    paths: dict[Path | None, None] = {}
    for pattern in config.input:
        paths.update(dict.fromkeys([None] if pattern == STDIN else _paths(pattern, config)))
    inputs = [_input_file(path, config) for path in paths]
    for file in inputs:
        if file.form in (Form.TEXT, Form.PARAGRAPHS) and len(config.json_keys) > 1:
            raise ConfigError(
                f"--input {file.name} is plain text, with one text per document: --json-keys "
                f"{' '.join(config.json_keys)} names several"
            )
    return inputs


def partition(inputs: Sequence[InputFile], rank: int, count: int) -> Iterator[InputFile]:
    """Yield the files of partition `rank` of `count`. Partitions have the same number of bytes on
    disk, as far as files can be divided. Plain JSON lines are divided between lines. Any other file
    belongs to the partition in which it starts."""
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
    # Prefer these formats, since folders of JSON lines often contain README.txt or LICENSE.txt.
    try:
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
    kind = config.input_format
    if kind == "parquet" or (kind == "auto" and name.endswith(".parquet")):
        return Form.PARQUET
    if kind == "txt" or (kind == "auto" and name.endswith(".txt")):
        return Form.TEXT if config.txt_documents == "file" else Form.PARAGRAPHS
    if kind == "json" or (kind == "auto" and name.endswith(".json")):
        return Form.ARRAY
    return Form.LINES


def expand_inputs(patterns: Sequence[str], endings: Sequence[str]) -> list[Path]:
    """Return the files among paths, globs and folders, in order and without repetitions. Matches of
    a glob or folder are sorted by name. A folder stands for its files, at any depth, with one of
    `endings` and optionally .gz or .zst. Raises FileNotFoundError if a pattern matches no file."""
    names = tuple(ending + packed for ending in endings for packed in ("", *PACKED_ENDINGS))
    try:
        files = [path for pattern in patterns for path in expand(pattern, names)]
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--input {error}") from None
    return list(dict.fromkeys(files))


def total_bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@dataclass(frozen=True)
class LineBatch:
    path: Path
    first_line: int  # number of the first line, counted from 1
    lines: list[bytes]
    position: int  # number of bytes on disk read so far, over all input files


def read_batches(paths: Sequence[Path], max_lines: int = 1000) -> Iterator[LineBatch]:
    """Yield all lines of all files, in batches of `max_lines` lines or about 1 MiB. A line that is
    too long (see `long_line`) is truncated on reading, so that a small compressed file cannot fill
    the memory. Raises ValueError if a compressed file is damaged or truncated."""
    done = 0
    for path in paths:
        with path.open("rb") as file, naming_file(path):
            lines: list[bytes] = []
            number, size = 1, 0
            stream = unpacked(file)
            while line := stream.readline(LONGEST_RECORD + 2):
                rest = line
                while len(line) > LONGEST_RECORD and rest and not rest.endswith(b"\n"):
                    rest = stream.readline(_BATCH_BYTES)
                lines.append(line)
                size += len(line)
                if len(lines) == max_lines or size >= _BATCH_BYTES:
                    yield LineBatch(path, number, lines, done + file.tell())
                    number, size, lines = number + len(lines), 0, []
            done += file.tell()
            if lines:
                yield LineBatch(path, number, lines, done)


@contextmanager
def opened(path: Path | None) -> Iterator[BinaryIO]:
    """Open a file for reading. None means the standard input."""
    if path is None:
        yield sys.stdin.buffer
    else:
        with path.open("rb") as file:
            yield file


def compression(head: bytes) -> str | None:
    """Return "gz", "zst" or None (not compressed), given the first four bytes of a file."""
    is_skippable_frame = head[1:4] == b"\x2a\x4d\x18" and head[:1] >= b"\x50"
    if head == b"\x28\xb5\x2f\xfd" or is_skippable_frame:
        return "zst"
    return "gz" if head[:2] == b"\x1f\x8b" else None


def unpacked(file: BinaryIO) -> io.BufferedReader:
    """Return a reader of a file's content without byte-order mark. The content is decompressed
    depending on its first bytes, not on the file's name. Reading may raise decompression errors,
    which `naming_file` converts."""
    assert isinstance(file, io.BufferedReader)
    stream = file
    if kind := compression(file.peek(4)[:4]):
        # threads=0: decompression is cheap, and external programs would hide errors.
        content = xopen(file, "rb", format=kind, threads=0)
        stream = io.BufferedReader(content, _BUFFER_BYTES)
    if stream.peek(3)[:3] == BYTE_ORDER_MARK:
        stream.read(3)
    return stream


@contextmanager
def naming_file(name: object) -> Iterator[None]:
    """Convert decompression errors to a ValueError that names the file."""
    try:
        yield
    except _UNPACKING_ERRORS as error:
        raise ValueError(f"--input {name} is damaged or cut short: {error}") from error
