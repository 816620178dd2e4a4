"""Arrays in HDF5 files, which appear whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron.util.files import check_inflation, replacing, sync

Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Type and shape of each dataset of a file."""
_STRUCTURE = 1 << 16
"""Bytes that are more than a file has besides its arrays."""


def needed_h5py() -> Any:
    """The library of these files. ValueError if it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise ValueError(
            "databases and neighbours of Retro are HDF5 files, which need h5py: "
            "run pip install -e '.[retro]' in the checkout"
        ) from error
    return h5py


def read_array(path: Path, name: str) -> np.ndarray:
    """Dataset ``name`` of a file, read-only: memory-mapped where it is contiguous, else read.
    FileNotFoundError if there is no such file, ValueError if it is damaged or has no such
    dataset."""
    with _opened(path) as file:
        if name not in file:
            raise ValueError(
                f"{path} has no dataset {name}, only {', '.join(file) or 'none'}: it is not of "
                "the stage that should have written it; delete it and run that stage again"
            )
        dataset = _own_dataset(file, name)
        offset = dataset.id.get_offset()  # None unless it is one contiguous piece
        if offset is None or not dataset.size:
            check_inflation(dataset.id.get_storage_size(), dataset.nbytes, f"{path}: {name}")
            array = np.asarray(dataset[()])
            array.flags.writeable = False
            return array
        return MappedArray(str(path), dataset.dtype, offset, dataset.shape).open()


def _own_dataset(file: Any, name: str) -> Any:
    """A dataset of numbers whose content is in this file: the format has several ways to take it
    from any other. Raises ValueError."""
    h5py = needed_h5py()
    dataset = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if (
        not isinstance(dataset, h5py.Dataset)
        or dataset.external
        or dataset.is_virtual
        or dataset.dtype.kind not in "iuf"
    ):
        raise ValueError(
            f"{name} is no array of numbers within the file, but a link, a group or of another "
            "type; it is not of a stage of tools/retro/preprocess_data.py"
        )
    return dataset


class MappedArray(NamedTuple):
    """Place of a memory-mapped array: what is sent to another process instead of its content."""

    path: str
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> MappedArray | None:
        """The place of an array of :func:`read_array`; None if it is not mapped."""
        base = array.base
        if not isinstance(base, np.memmap):
            return None
        return cls(str(base.filename), base.dtype, base.offset, base.shape)

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape).view(np.ndarray)


def array_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's arrays, by name; errors as of :func:`read_array`."""
    with _opened(path) as file:
        return {name: _own_dataset(file, name).shape for name in file}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes or replaces a file with a dataset for each array. OSError if it cannot be written."""
    layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with writing(path, layout) as files:
        for name, array in arrays.items():
            files[name].append(array)


class ArrayWriter:
    """Appends rows to a dataset of a file that is being written."""

    def __init__(self, file: BinaryIO, dtype: np.dtype, offset: int) -> None:
        self._file, self._dtype, self._position = file, dtype, offset

    def append(self, rows: np.ndarray) -> None:
        """OSError if the disk is full."""
        if rows.size:
            content = np.ascontiguousarray(rows, self._dtype).data.cast("B")
            self._file.seek(self._position)
            self._file.write(content)
            self._position += content.nbytes


@contextmanager
def writing(path: Path, layout: Layout) -> Iterator[dict[str, ArrayWriter]]:
    """Datasets of known sizes to fill, in a file that appears as ``path`` when the block ends
    without an error. Its bytes depend on what is written only. OSError if it cannot be written.

    The library crashes where a disk is full, so that it makes the structure of the file only, in a
    file with space for it; the arrays, which are contiguous, are written here.
    """
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())
    with replacing(path) as part:
        with part.open("xb") as file:
            file.write(bytes(_STRUCTURE))
            sync(file)
            file.truncate(_STRUCTURE + size)
        offsets = _structure(part, layout)
        with part.open("r+b") as file:
            yield {
                name: ArrayWriter(file, layout[name][0], offset) for name, offset in offsets.items()
            }
            sync(file)


def _structure(path: Path, layout: Layout) -> dict[str, int]:
    """Makes a file of empty datasets; returns the offset of each in the file."""
    h5py = needed_h5py()
    offsets = {}
    with h5py.File(path, "w") as file:
        for name, (dtype, shape) in layout.items():
            how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            how.set_layout(h5py.h5d.CONTIGUOUS)
            how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            how.set_obj_track_times(False)
            kind = h5py.h5t.py_create(dtype, logical=True)
            space = h5py.h5s.create_simple(shape)
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space, how)
            offsets[name] = dataset.get_offset() or 0  # None of an empty dataset
    return offsets


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    damaged = f"{path} is damaged or cut short; delete it and run the stage that wrote it again"
    try:
        file = needed_h5py().File(path, "r")
    except OSError as error:
        raise ValueError(f"{damaged} ({error})") from error
    with file:
        try:
            yield file
        except ValueError as error:
            raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from None
        except Exception as error:  # the library has no separate class for damaged content
            raise ValueError(f"{damaged} ({type(error).__name__}: {error})") from error
