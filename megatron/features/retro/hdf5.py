"""Reading and writing of arrays in HDF5 files. A written file appears only once it is complete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron.util.files import check_inflation, replacing, sync

Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Dtype and shape of each dataset in a file, by name."""
_STRUCTURE = 1 << 16
"""Upper bound on the size, in bytes, of a file's HDF5 structures without its arrays."""


def needed_h5py() -> Any:
    """Return the h5py module. Raises ValueError if it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise ValueError(
            "databases and neighbours of Retro are HDF5 files, which need h5py: "
            "run pip install -e '.[retro]' in the checkout"
        ) from error
    return h5py


def read_array(path: Path, name: str) -> np.ndarray:
    """Return the dataset ``name`` of a file as a read-only array. It is memory-mapped if the
    dataset is contiguous, and otherwise read into memory. Raises FileNotFoundError if the file does
    not exist, and ValueError if it is damaged or has no such dataset."""
    with _opened(path) as file:
        if name not in file:
            raise ValueError(
                f"{path} has no dataset {name}, only {', '.join(file) or 'none'}: it is not of "
                "the stage that should have written it; delete it and run that stage again"
            )
        dataset = _own_dataset(file, name)
        offset = dataset.id.get_offset()  # None unless the dataset is contiguous
        if offset is None or not dataset.size:
            check_inflation(dataset.id.get_storage_size(), dataset.nbytes, f"{path}: {name}")
            array = np.asarray(dataset[()])
            array.flags.writeable = False
            return array
        return MappedArray(str(path), dataset.dtype, offset, dataset.shape).open()


def _own_dataset(file: Any, name: str) -> Any:
    """Return the numeric dataset ``name``. Raises ValueError if it is anything else, or if its
    content is outside this file: HDF5 links can point to arbitrary other files."""
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
    """Location of a memory-mapped array, which is pickled instead of the array's content."""

    path: str
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray) -> MappedArray | None:
        """Return the location of an array from :func:`read_array`, or None if it is not mapped."""
        base = array.base
        if not isinstance(base, np.memmap):
            return None
        return cls(str(base.filename), base.dtype, base.offset, base.shape)

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape).view(np.ndarray)


def array_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's arrays, by name. Raises the errors of :func:`read_array`."""
    with _opened(path) as file:
        return {name: _own_dataset(file, name).shape for name in file}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write or replace a file with one dataset for each array. Raises OSError on failure."""
    layout = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with writing(path, layout) as files:
        for name, array in arrays.items():
            files[name].append(array)


class ArrayWriter:
    """Writer that appends rows to a dataset in a file."""

    def __init__(self, file: BinaryIO, dtype: np.dtype, offset: int) -> None:
        self._file, self._dtype, self._position = file, dtype, offset

    def append(self, rows: np.ndarray) -> None:
        """Append rows. Raises OSError if the disk is full."""
        if rows.size:
            content = np.ascontiguousarray(rows, self._dtype).data.cast("B")
            self._file.seek(self._position)
            self._file.write(content)
            self._position += content.nbytes


@contextmanager
def writing(path: Path, layout: Layout) -> Iterator[dict[str, ArrayWriter]]:
    """Yield a writer for each dataset in a new file, by name. ``layout`` has the datasets' final
    shapes. The file appears as ``path`` when the block ends without an error. Its bytes depend only
    on what is written. Raises OSError if it cannot be written.

    h5py crashes if the disk is full. It is therefore used only to create the file's structure, once
    disk space has been reserved. The contiguous arrays are written without it.
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
    """Create a file with empty datasets, and return the offset of each in the file, by name."""
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
            offsets[name] = dataset.get_offset() or 0  # None for an empty dataset
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
        except Exception as error:  # h5py has no specific exception for damaged content
            raise ValueError(f"{damaged} ({type(error).__name__}: {error})") from error
