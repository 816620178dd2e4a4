"""The input files with what they hold, and which part of them a partition reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from megatron.config import ConfigError
from megatron.corpus.preprocessing.config import STDIN, PreprocessConfig
from megatron.corpus.preprocessing.inputs import (
    JSON_ENDINGS,
    PACKED_ENDINGS,
    expand_inputs,
)
from megatron.corpus.preprocessing.unpack import is_packed, naming_file, opened, unpacked

_PARQUET_ENDING = ".parquet"
_TXT_ENDING = ".txt"


class Form(Enum):
    """How a file holds its documents; the value is what messages call one of its records."""

    LINES = "line"
    ARRAY = "item"
    TEXT = "document"
    PARAGRAPHS = "paragraph"
    PARQUET = "row"


@dataclass(frozen=True)
class Source:
    """An input file, or the part of one that a partition reads."""

    path: Path | None
    """None: the standard input."""
    form: Form
    size: int
    """Bytes on disk."""
    mtime_ns: int
    """When it was changed last, in nanoseconds."""
    is_packed: bool
    start: int = 0
    stop: int | None = None
    """What is read: lines that start from byte `start` up to byte `stop` (None: the end)."""

    @property
    def name(self) -> str:
        """As messages give it."""
        return "the standard input" if self.path is None else str(self.path)

    @property
    def is_divisible(self) -> bool:
        """Whether a worker can start to read anywhere in it."""
        return self.form is Form.LINES and not self.is_packed and self.path is not None

    @property
    def bytes_to_read(self) -> int:
        """On disk."""
        return (self.size if self.stop is None else self.stop) - self.start


def find_sources(config: PreprocessConfig) -> list[Source]:
    """What --input stands for, in order, each file once.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: a .txt file, which has one text, with several --json-keys.
    """
    found: dict[Path | None, None] = {}
    for pattern in config.input:
        found.update(dict.fromkeys([None] if pattern == STDIN else _paths(pattern, config)))
    sources = [_source(path, config) for path in found]
    for source in sources:
        if source.form in (Form.TEXT, Form.PARAGRAPHS) and len(config.json_keys) > 1:
            raise ConfigError(
                f"--input {source.name} is plain text, one text a document: --json-keys "
                f"{' '.join(config.json_keys)} names several"
            )
    return sources


def partition(sources: Sequence[Source], rank: int, count: int) -> list[Source]:
    """Part `rank` of `count`, equal in bytes on disk as far as files can be divided.

    Plain JSON lines are cut at a line; another file belongs to the part in which it starts.
    """
    total = sum(source.size for source in sources)
    first, last = total * rank // count, total * (rank + 1) // count
    return list(_between(sources, first, last, is_last=rank == count - 1))


def _between(sources: Sequence[Source], first: int, last: int, is_last: bool) -> Iterator[Source]:
    begin = 0
    for source in sources:
        start, stop = max(first - begin, 0), min(last - begin, source.size)
        if source.is_divisible:
            if start < stop:
                yield replace(source, start=start, stop=stop)
        elif first <= begin < last or (is_last and begin == last):
            yield source
        begin += source.size


def _paths(pattern: str, config: PreprocessConfig) -> list[Path]:
    tables = (*JSON_ENDINGS, _PARQUET_ENDING)
    of_format = {
        "jsonl": JSON_ENDINGS,
        "json": JSON_ENDINGS,
        "txt": (_TXT_ENDING,),
        "parquet": (_PARQUET_ENDING,),
    }
    if config.input_format in of_format:
        return expand_inputs([pattern], of_format[config.input_format])
    # A folder of JSON lines often has a README.txt or LICENSE.txt beside them.
    try:
        return expand_inputs([pattern], tables)
    except FileNotFoundError:
        return expand_inputs([pattern], (*tables, _TXT_ENDING))


def _source(path: Path | None, config: PreprocessConfig) -> Source:
    if path is None:
        return Source(None, _form("", config), 0, 0, is_packed=False)
    status = os.stat(path)
    with opened(path) as file:
        packed = is_packed(file.read(4))
        form = _form(_without_packing(path.name), config)
        if form is Form.ARRAY and config.input_format == "auto":
            file.seek(0)
            with naming_file(path):
                if not unpacked(file).read(1 << 16).lstrip().startswith(b"["):
                    form = Form.LINES
    return Source(path, form, status.st_size, status.st_mtime_ns, packed)


def _form(name: str, config: PreprocessConfig) -> Form:
    wanted = config.input_format
    if wanted == "parquet" or (wanted == "auto" and name.endswith(_PARQUET_ENDING)):
        return Form.PARQUET
    if wanted == "txt" or (wanted == "auto" and name.endswith(_TXT_ENDING)):
        return Form.TEXT if config.txt_documents == "file" else Form.PARAGRAPHS
    if wanted == "json" or (wanted == "auto" and name.endswith(".json")):
        return Form.ARRAY
    return Form.LINES


def _without_packing(name: str) -> str:
    for ending in PACKED_ENDINGS:
        name = name.removesuffix(ending)
    return name
