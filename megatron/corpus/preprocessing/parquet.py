"""Texts of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

from megatron.config import ConfigError

Rows = list[list[str | None]]
"""A list of texts for each column; None is Parquet's null."""
_ROWS_AT_A_TIME = 1024


def read_rows(
    file: BinaryIO, name: str, columns: Sequence[str], first: int, block_bytes: int
) -> Iterator[tuple[Rows, int, float]]:
    """Rows from number `first` on, up to about `block_bytes` of text at a time, with the number of
    the row after them and the share of the file that is then read.

    Raises:
        ConfigError: pyarrow is not installed.
        ValueError: the file is damaged, or a column is missing or holds no text.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"--input {name} is a Parquet file: reading it needs the package pyarrow "
            "(pip install pyarrow)"
        ) from error
    try:
        table = parquet.ParquetFile(file)
        _check_columns(table.schema_arrow, name, columns)
        total, at = table.metadata.num_rows, 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if at + rows <= first:
                at += rows
                continue
            for batch in table.iter_batches(_ROWS_AT_A_TIME, [group], list(columns)):
                texts = [batch.column(column).to_pylist() for column in columns]
                for taken in _cut(texts, max(first - at, 0), block_bytes):
                    part = [column[taken.start : taken.stop] for column in texts]
                    yield part, at + taken.stop, (at + taken.stop) / total
                at += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"--input {name} is damaged or no Parquet file: {error}") from error


def _check_columns(schema, name: str, columns: Sequence[str]) -> None:  # type: ignore[no-untyped-def]
    from pyarrow import types

    for column in columns:
        if column not in schema.names:
            raise ValueError(
                f"--input {name} has no column {column!r} (--json-keys); its columns: "
                + ", ".join(schema.names)
            )
        kind = schema.field(column).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
            raise ValueError(
                f"--input {name}: column {column!r} (--json-keys) holds {kind}, not strings"
            )


def _cut(texts: Rows, start: int, block_bytes: int) -> Iterator[range]:
    size, begin = 0, start
    count = len(texts[0])
    for row in range(start, count):
        size += sum(len(column[row] or "") for column in texts)
        if size >= block_bytes:
            yield range(begin, row + 1)
            size, begin = 0, row + 1
    if begin < count:
        yield range(begin, count)
