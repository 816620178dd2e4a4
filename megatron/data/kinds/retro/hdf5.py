"""Arrays in HDF5 files, which appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron.util.files import replacing, sync_path


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ValueError(
            "databases and neighbours of Retro are HDF5 files, which need h5py: "
            "pip install 'megatron-deepspeed[retro]'"
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
        dataset = file[name]
        offset = dataset.id.get_offset()  # None unless it is one contiguous piece
        if offset is None or not dataset.size:
            found = np.asarray(dataset[()])
            found.flags.writeable = False
            return found
        return np.memmap(path, dataset.dtype, "r", offset, dataset.shape).view(np.ndarray)


def array_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's arrays, by name; errors as of :func:`read_array`."""
    with _opened(path) as file:
        return {name: dataset.shape for name, dataset in file.items()}


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file with a dataset for each array, on the disk; an existing file is replaced.
    OSError if it cannot be written."""
    with writing(path) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, track_times=False)


@contextmanager
def writing(path: Path) -> Iterator[Any]:
    """An ``h5py.File`` that appears as ``path`` when the block ends without an error. Its bytes
    depend on what is written only."""
    with replacing(path) as part:
        with _h5py().File(part, "x") as file:
            yield file
        sync_path(part)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        file = _h5py().File(path, "r")
    except OSError as error:
        raise ValueError(
            f"{path} is damaged or cut short; delete it and run the stage that wrote it again "
            f"({error})"
        ) from error
    with file:
        yield file
