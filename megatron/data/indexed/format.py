"""The constants of the format, and the names of its files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document boundaries."""


def best_dtype(vocab_size: int | None) -> np.dtype:
    """The token dtype Megatron chooses: uint16 below a vocabulary of 65,500, else int32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65_500 else np.dtype("<i4")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """The token file of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """The index file of a prefix."""
    return Path(f"{os.fspath(prefix)}.idx")
