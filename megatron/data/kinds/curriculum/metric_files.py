"""Files that hold the difficulty of samples, as DeepSpeed's data analyzer writes them.

    NAME_sample_to_metric    row i: the value of sample i
    NAME_index_to_metric     row i: the i-th of the values that occur, in rising order
    NAME_index_to_sample     row i: the samples that have it, in rising order

each a pair of files .bin and .idx. Their layout is that of Megatron's indexed datasets (see
``megatron.data.indexed``), with one document of all rows, but for the codes of three dtypes: 6, 7
and 8 are unsigned integers of 2, 4 and 8 bytes. A file takes the smallest dtype, the unsigned ones
first, that holds all its values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.util.files import write_whole

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<u2", "<u4", "<u8"), start=1)
}


@dataclass(frozen=True)
class Rows:
    """Rows of integers, back to back.

    Attributes:
        values: those of all rows, [total].
        ends: where each row ends in ``values``, int64[rows].
    """

    values: npt.NDArray[np.integer]
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> npt.NDArray[np.integer]:
        start = int(self.ends[row - 1]) if row else 0
        return self.values[start : int(self.ends[row])]


def read_rows(prefix: str) -> Rows:
    """Maps a pair of files.

    Raises:
        FileNotFoundError: one of them is missing.
        ValueError: they are damaged or do not belong together; the message names the file.
    """
    bin_file, idx_file = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (idx_file, bin_file):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; tools/analyze_data.py writes it, and a path is that of "
                "the .bin and .idx files without the ending"
            )
    content = idx_file.read_bytes()
    if len(content) < _HEADER.size or content[:9] != _MAGIC:
        raise ValueError(f"{idx_file} is no index of DeepSpeed's data analyzer")
    _, version, code, rows, documents = _HEADER.unpack_from(content)
    expected = _HEADER.size + 12 * rows + 8 * documents
    if version != _VERSION or code not in _DTYPES or len(content) != expected:
        raise ValueError(
            f"{idx_file} is damaged: version {version}, dtype code {code}, {len(content)} bytes "
            f"where its {rows} rows make {expected}"
        )
    ends = np.cumsum(np.frombuffer(content, "<i4", rows, _HEADER.size), dtype=np.int64)
    dtype, total = _DTYPES[code], int(ends[-1]) if rows else 0
    size = bin_file.stat().st_size
    if size != total * dtype.itemsize:
        raise ValueError(
            f"{bin_file} has {size} bytes, but {idx_file} describes {total * dtype.itemsize}: it "
            "was cut short, or the two come from different analyses"
        )
    values = np.memmap(bin_file, dtype, mode="r").view(np.ndarray) if size else np.empty(0, dtype)
    return Rows(values, ends)


def write_rows(prefix: str, values: npt.NDArray[np.integer], lengths: npt.ArrayLike) -> None:
    """Writes a pair of files; neither is there before it is complete.

    Args:
        values: those of all rows, back to back.
        lengths: number of values of each row.
    """
    sizes = np.asarray(lengths, np.int64)
    assert sizes.sum() == len(values)
    if len(sizes) and sizes.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{prefix}: a row of {sizes.max()} values; the format holds 2**31 - 1")
    dtype = _smallest_dtype(values)
    pointers = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1] * dtype.itemsize, out=pointers[1:])
    code = next(code for code, known in _DTYPES.items() if known == dtype)
    header = _HEADER.pack(_MAGIC, _VERSION, code, len(sizes), 2)
    documents = np.array([0, len(sizes)], "<i8")
    index = b"".join(
        [header, sizes.astype("<i4").tobytes(), pointers.astype("<i8").tobytes(), bytes(documents)]
    )
    # An old index must never describe new values, not even after a kill between the two.
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    write_whole(Path(f"{prefix}.bin"), np.ascontiguousarray(values.astype(dtype, copy=False)).data)
    write_whole(Path(f"{prefix}.idx"), index)


def _smallest_dtype(values: npt.NDArray[np.integer]) -> np.dtype:
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    names = ("<u1", "<u2", "<u4", "<u8") if low >= 0 else ("<i1", "<i2", "<i4", "<i8")
    fits = (np.iinfo(name) for name in names)
    return next(
        np.dtype(name)
        for name, limits in zip(names, fits, strict=True)
        if limits.min <= low and high <= limits.max
    )
