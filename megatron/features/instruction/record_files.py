"""Reading of record files: JSON lines, JSON arrays, Parquet, CSV and TSV, and folders from the
Hugging Face Hub, whose files are named after their split."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from megatron.data.index_cache import FOLDER
from megatron.features.raw_text.records import (
    BYTE_ORDER_MARK,
    ArrayReader,
    is_too_deep,
    long_line,
    read_lines,
)
from megatron.features.raw_text.text_files import TableRows, TextFile, text_files
from megatron.util.files import PARQUET_LIMITS, check_inflation
from megatron.util.json_text import MAX_DEPTH

_PLAIN = (".json", ".jsonl", ".csv", ".tsv")
ENDINGS = (*_PLAIN, ".parquet", *(f"{ending}.gz" for ending in _PLAIN))
TRAIN, HELD_OUT = ("train",), ("validation", "valid", "val", "dev", "eval", "test")
"""Split names for training and for evaluation. Earlier evaluation names take precedence."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?")
_ABOUT = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""Metadata files of the Hub and of `datasets`, which contain no records."""
_ROWS = 32
"""Number of rows of a Parquet file that are in memory at a time."""
_LARGE_BATCH = 1 << 26
"""Size in bytes above which a decompressed batch of rows is checked for excessive inflation."""


def records_of(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) for each record of a file. The location is for error messages.
    Raises ValueError with the location if the file is malformed."""
    name = path.lower()
    if name.endswith(".parquet"):
        yield from _rows_of_parquet(path)
        return
    delimiter = {".csv": ",", ".tsv": "\t"}.get(name.removesuffix(".gz")[-4:])
    try:
        yield from _rows_of_table(path, delimiter) if delimiter else _json_records(path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or not a gzip file: {error}") from None


def _opened(path: str) -> io.BufferedReader:
    return io.BufferedReader(gzip.open(path)) if path.lower().endswith(".gz") else open(path, "rb")


def example_files(path: str) -> list[TextFile]:
    """Return the files of a path: a file, a folder or a glob. Raises FileNotFoundError if no file
    matches, and ValueError if a folder has no records or several splits."""
    splits = splits_of(path)
    if len(splits) > 1:
        raise ValueError(f"{path} has several splits: name one as the path, {_listed(splits)}")
    files = text_files(next(iter(splits.values()), path), ENDINGS)
    if Path(path).is_dir():
        files = [file for file in files if _has_records(Path(file.path), Path(path))]
    if not files:
        raise ValueError(
            f"{path} has no file of records (*{' *'.join(_PLAIN)} *.parquet); write a data set of "
            "save_to_disk again with to_parquet"
        )
    return files


def split_of(path: str, kinds: Sequence[str]) -> str:
    """Return the split of a folder, as a glob. It is of the first of ``kinds`` that the folder has.
    A path that is not a folder of splits is returned unchanged. Raises ValueError if no split is of
    these kinds, or several are of the chosen kind."""
    splits = splits_of(path)
    if not splits:
        return path
    kind = next((kind for kind in kinds if any(_kind(name) == kind for name in splits)), None)
    fitting = [files for name, files in splits.items() if kind and _kind(name) == kind]
    if len(fitting) == 1:
        return fitting[0]
    problem = f"several splits of the kind {kind}" if kind else f"no split {' or '.join(kinds)}"
    raise ValueError(f"{path} has {problem}: name one as the path, {_listed(splits)}")


def splits_of(path: str) -> dict[str, str]:
    """Return the splits of a folder as globs, by name with the subfolder as a prefix. Return an
    empty dictionary if neither files nor subfolders are named after splits."""
    splits: dict[str, str] = {}
    is_sharded = False
    folder = Path(path)
    files = sorted(folder.rglob("*")) if folder.is_dir() else []
    for file in files:
        if not _has_records(file, folder):
            continue
        inside = file.relative_to(folder)
        ending = next(each for each in ENDINGS if file.name.endswith(each))
        stem = file.name.removesuffix(ending)
        shard = _SHARD.fullmatch(stem)
        name = shard[1] if shard else stem
        if _kind(name) is None and _kind(inside.parent.name) is not None:
            split, pattern = inside.parent, f"{glob.escape(str(file.parent))}/*{ending}"
        else:
            split = inside.parent / name
            ending = f"{'-*' if shard else ''}{ending}"
            pattern = glob.escape(str(file.with_name(name))) + ending
            is_sharded |= shard is not None and _kind(name) is not None
        splits[f"{split.as_posix()}{ending}"] = pattern
    kinds = {_kind(split) for split in splits} - {None}
    return splits if is_sharded or len(kinds) > 1 else {}


def _has_records(file: Path, folder: Path) -> bool:
    """Return whether a file in a folder has records: it is neither hidden nor metadata."""
    parts = file.relative_to(folder).parts
    is_hidden = any(part.startswith(".") or part == FOLDER for part in parts)
    return file.name.endswith(ENDINGS) and file.name not in _ABOUT and not is_hidden


def _kind(split: str) -> str | None:
    """Return the kind of a split, such as ``train`` for ``data/train_sft``, or None."""
    words = re.split(r"[-_.]", split.rpartition("/")[2].lower())
    return next((word for word in words if word in (*TRAIN, *HELD_OUT)), None)


def _listed(splits: dict[str, str]) -> str:
    return ", ".join(splits.values())


def _json_records(path: str) -> Iterator[tuple[str, Any]]:
    with _opened(path) as file:
        start = len(BYTE_ORDER_MARK) if file.peek(3)[:3] == BYTE_ORDER_MARK else 0
        file.seek(start)
        while (byte := file.read(1)).isspace():
            pass
        file.seek(start)
        if byte == b"[":
            for number, item in enumerate(_items(file, path), 1):
                place = f"{path}, record {number}"
                yield place, _parsed(item, place)
        else:
            for number, (_, line) in enumerate(read_lines(file), 1):
                place = f"{path}, line {number}"
                if too_long := long_line(line, number):
                    raise ValueError(f"{place}: {too_long.reason}")
                if line and not line.isspace():
                    yield place, _parsed(line, place)


def _items(file: io.BufferedReader, path: str) -> Iterator[bytes]:
    try:
        yield from ArrayReader(file)
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def _parsed(text: bytes, place: str) -> Any:
    if is_too_deep(text, MAX_DEPTH):
        raise ValueError(f"{place}: nested more than {MAX_DEPTH} levels deep")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        shown = text[:60].decode("utf-8", "replace").rstrip()
        raise ValueError(f"{place}: not JSON ({error}): {shown!r}") from None


def _rows_of_table(path: str, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (location, row) for a table whose first row contains the column names."""
    with _opened(path) as file:
        rows = TableRows(file, delimiter, strict=True)
        names: list[str] | None = None
        try:
            for _, row in rows:
                place = f"{path}, line {rows.line}"
                if names is None:
                    names = row
                    if len(set(names)) < len(names):
                        raise ValueError(f"{place}: two columns have the same name")
                elif len(row) not in (0, len(names)):
                    raise ValueError(f"{place}: {len(row)} values for {len(names)} columns")
                elif row:
                    yield place, dict(zip(names, row, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {rows.line}: not a row of a table: {error}") from None


def _rows_of_parquet(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path} is a Parquet file: reading it needs the package pyarrow (pip install pyarrow)"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False, **PARQUET_LIMITS) as file:
            for group in range(file.num_row_groups):
                for batch in _batches(file, group, f"{path}, row group {group + 1}"):
                    for place in range(len(batch)):
                        number += 1
                        row = batch.slice(place, 1).to_pylist()[0]
                        yield f"{path}, row {number}", _pruned(row)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged or not a Parquet file: {error}") from None


def _batches(file: Any, group: int, where: str) -> Iterator[Any]:
    """Yield the rows of a row group in small batches. Raises ValueError on excessive inflation."""
    chunks = file.metadata.row_group(group)
    columns = [chunks.column(place) for place in range(chunks.num_columns)]
    packed = sum(column.total_compressed_size for column in columns)
    check_inflation(packed, sum(column.total_uncompressed_size for column in columns), where)
    large = 0
    for batch in file.iter_batches(_ROWS, [group]):
        if batch.nbytes > _LARGE_BATCH:  # repeated texts may be stored only once
            large += batch.nbytes
            check_inflation(packed, large, where)
        yield batch


def _pruned(value: Any, depth: int = 0) -> Any:
    """Return a record without null keys in its objects, because Parquet gives every object the keys
    of all others. Null contents of messages are kept."""
    if isinstance(value, list):
        return [_pruned(item, depth) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _pruned(item, depth + 1)
        for key, item in value.items()
        if item is not None or not depth or (depth == 1 and key in ("content", "value"))
    }
