"""Files of DeepSpeed's data analyzer: rows of integers, as a pair of .bin and .idx.

The layout is that of Megatron's indexed datasets (see ``megatron.data.indexed``), with one document
of all rows, except that the dtype codes 6, 7 and 8 are unsigned integers of 2, 4 and 8 bytes. Files
are written and read in blocks, because those of a large corpus do not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.indexed import HEADER, MAGIC, VERSION, map_file
from megatron.util.files import replacing, sync, sync_path

_DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8"), start=1)
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
BLOCK = 1 << 20
"""Number of rows of an index, or of values, that are processed at a time."""


@dataclass(frozen=True)
class MetricRows:
    values: npt.NDArray[np.integer]
    """All rows, concatenated."""
    ends: npt.NDArray[np.int64]
    """End of each row within ``values``, int64 [rows]."""

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> npt.NDArray[np.integer]:
        start = int(self.ends[row - 1]) if row else 0
        return self.values[start : int(self.ends[row])]


class ValueBlock(NamedTuple):
    """At most :data:`BLOCK` consecutive values of a file."""

    prefix: Path
    start: int

    @property
    def values(self) -> npt.NDArray[np.integer]:
        return read_values(self.prefix)[self.start : self.start + BLOCK]


class _Index(NamedTuple):
    dtype: np.dtype
    lengths: npt.NDArray[np.int32]
    """Lengths of the rows, mapped into memory."""


def read_rows(prefix: str | Path) -> MetricRows:
    """Map a pair of files into memory. Raises FileNotFoundError if one is missing, and ValueError
    if they are damaged or do not belong together."""
    index = _read_index(prefix)
    ends = np.cumsum(index.lengths, dtype=np.int64)
    return MetricRows(_values(prefix, index.dtype, int(ends[-1]) if len(ends) else 0), ends)


def read_values(prefix: str | Path) -> npt.NDArray[np.integer]:
    """Map the concatenated values of all rows. Raises the errors of :func:`read_rows`."""
    index = _read_index(prefix)
    return _values(prefix, index.dtype, int(index.lengths.sum(dtype=np.int64)))


def _read_index(prefix: str | Path) -> _Index:
    bin_file, idx_file = _pair(prefix)
    for path in (idx_file, bin_file):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; tools/analyze_data.py writes it, and a path is that of "
                "the .bin and .idx files without the ending"
            )
    with idx_file.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"{idx_file} is not an index of DeepSpeed's data analyzer")
    _, version, code, rows, documents = HEADER.unpack(header)
    size, expected = idx_file.stat().st_size, HEADER.size + 12 * rows + 8 * documents
    if version != VERSION or code not in _DTYPES or size != expected:
        raise ValueError(
            f"{idx_file} is damaged: version {version}, dtype code {code}, {size} bytes "
            f"where its {rows} rows make {expected}"
        )
    content = map_file(idx_file, np.dtype("u1"))
    return _Index(_DTYPES[code], np.frombuffer(content.data, "<i4", rows, HEADER.size))


def _values(prefix: str | Path, dtype: np.dtype, total: int) -> npt.NDArray[np.integer]:
    bin_file, idx_file = _pair(prefix)
    size = bin_file.stat().st_size
    if size != total * dtype.itemsize:
        raise ValueError(
            f"{bin_file} has {size} bytes, but {idx_file} expects {total * dtype.itemsize}: it "
            "was cut short, or the two come from different analyses"
        )
    return map_file(bin_file, dtype)


def fitting_dtype(low: int, high: int) -> np.dtype:
    """Return the smallest dtype for values from ``low`` to ``high``, unsigned if possible."""
    return next(
        dtype
        for dtype in sorted(_CODES, key=lambda dtype: dtype.itemsize)
        if dtype.kind == ("u" if low >= 0 else "i")
        and np.iinfo(dtype).min <= low
        and high <= np.iinfo(dtype).max
    )


def write_rows(prefix: str | Path, values: npt.NDArray[np.integer], lengths: npt.ArrayLike) -> None:
    """Write a pair of files, given the concatenated values of all rows and the rows' lengths."""
    sizes = np.asarray(lengths, np.int64)
    assert sizes.sum() == len(values)
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    dtype = fitting_dtype(low, high)
    with replacing_values(prefix) as part:
        part.write_bytes(np.ascontiguousarray(values.astype(dtype, copy=False)).data)
    write_index(prefix, dtype, sizes)


@contextmanager
def appending_values(
    prefix: str | Path, dtype: np.dtype
) -> Iterator[Callable[[npt.NDArray[np.integer]], None]]:
    """Write a pair of files with one value per row. Yields a function that appends values."""
    count = 0
    with replacing_values(prefix) as part, part.open("xb") as file:

        def append(values: npt.NDArray[np.integer]) -> None:
            nonlocal count
            file.write(np.ascontiguousarray(values.astype(dtype, copy=False)).data)
            count += len(values)

        yield append
    write_index(prefix, dtype, np.broadcast_to(np.int64(1), (count,)))


@contextmanager
def replacing_values(prefix: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces the .bin at the end of the block; :func:`write_index`
    must be called afterwards. The old index is removed first, so that it never describes new
    values, even if the process is killed in between."""
    bin_file, idx_file = _pair(prefix)
    bin_file.parent.mkdir(parents=True, exist_ok=True)
    idx_file.unlink(missing_ok=True)
    with replacing(bin_file) as part:
        yield part
        sync_path(part)


def write_index(prefix: str | Path, dtype: np.dtype, lengths: npt.NDArray[np.integer]) -> None:
    """Write the .idx for rows of these lengths. Raises ValueError if one is 2**31 or more."""
    rows = len(lengths)
    if rows and lengths.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{prefix}: a row of {lengths.max()} values; the format allows 2**31 - 1")
    blocks = [slice(start, start + BLOCK) for start in range(0, rows, BLOCK)]
    with replacing(_pair(prefix)[1]) as part, part.open("xb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, _CODES[dtype], rows, 2))
        for block in blocks:
            file.write(lengths[block].astype("<i4").tobytes())
        offset = 0
        for block in blocks:
            ends = offset + np.cumsum(lengths[block]) * dtype.itemsize
            file.write((ends - lengths[block] * dtype.itemsize).astype("<i8").tobytes())
            offset = int(ends[-1])
        file.write(np.array([0, rows], "<i8").tobytes())
        sync(file)


def _pair(prefix: str | Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
