"""Cache of index arrays, which are built once and then memory-mapped.

An entry is a folder `<name>-<hash of its inputs>/` with one .npy file per array and a
`description.json` of what it was built from. It is written under a temporary name and renamed when
complete, so readers see either all of it or nothing. A lock keeps other processes, on this node or
others, from building the same entry. On file systems without locks several may build it, and the
first to finish wins.

A damaged entry is an error and is not rebuilt, because other files may be damaged too.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import has_magic
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from megatron.util.digests import digest, digest_of_parts
from megatron.util.files import Lock, LockTakenError, naming, sync

logger = logging.getLogger(__name__)

DESCRIPTION = "description.json"
FOLDER = "index-cache"
_SECONDS_BEFORE_SAYING_SO = 5.0
_DIGEST_BLOCK = 1 << 20
_DIGEST_BLOCKS = 64


class Blocks(NamedTuple):
    """Array that is written block by block, so that it is never completely in memory."""

    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Iterable[np.ndarray]
    """Consecutive slices along the first dimension."""


Built = Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray | Blocks]]
"""Arrays by name. An iterable of pairs is consumed one at a time, so that each array can be freed
before the next one is built."""
Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""Expected dtype and shape by array name."""


class StoredArrays(Mapping[str, np.ndarray]):
    """Named arrays. A cache entry's arrays are memory-mapped, and pickled as the entry's path."""

    def __init__(self, arrays: Mapping[str, np.ndarray], folder: Path | None = None) -> None:
        self._arrays = dict(arrays)
        self._folder = folder

    def damaged(self, what: str) -> ValueError:
        if self._folder is None:
            return ValueError(f"an index in memory is damaged: {what}")
        return _damaged(self._folder, what)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._folder is None:
            return type(self), (self._arrays,)
        return _map_entry, (self._folder,)


@dataclass(frozen=True)
class IndexCache:
    """Folder of built arrays. If `folder` is None, everything stays in memory."""

    folder: Path | None
    required: bool = False
    """True if an unwritable folder is an error and not a warning, because a flag names it."""

    @classmethod
    def next_to(cls, prefix: str, data_cache_path: str | None) -> IndexCache:
        """Return the cache in `--data-cache-path`, or by default in `index-cache/` next to the
        data. For a glob this is next to the first path component with a wildcard; for a URL, in the
        working directory; for a file in an `index-cache/`, that folder itself."""
        if data_cache_path is not None:
            return cls(Path(data_cache_path), required=True)
        if "://" in prefix:
            return cls(Path(FOLDER).absolute())
        path = Path(prefix).absolute()
        pattern = next((part for part in path.parents[::-1] if has_magic(part.name)), path)
        folder = pattern.parent
        return cls(folder if folder.name == FOLDER else folder / FOLDER)

    def arrays(
        self,
        name: str,
        depends_on: Mapping[str, Any],
        build: Callable[[], Built],
        layout: Layout | None = None,
    ) -> StoredArrays:
        """Return an entry's arrays. Builds the entry if it does not exist.

        `depends_on` is everything that the arrays depend on, as JSON values. `layout` is the
        expected layout, if known in advance. If the folder is not writable, raises OSError if it is
        required, else builds the arrays in memory. Raises ValueError if the entry is damaged.
        """
        if self.folder is None:
            return _in_memory(build)
        entry = self._entry(self.folder, name, depends_on, layout)
        cached = entry.open()
        if cached is not None:
            return cached
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with single_writer(entry.folder):
                return entry.open() or entry.publish(build())
        except OSError as error:
            problem = f"cannot write the index cache {self.folder} ({error.strerror or error})"
            if self.required:
                raise OSError(
                    f"--data-cache-path: {problem}; give a folder that every process can write, "
                    "or build the indices in advance as a user who can"
                ) from error
            logger.warning(
                "%s: building %s in the memory of every process; give --data-cache-path a writable "
                "folder to build it once",
                problem,
                name,
            )
            return _in_memory(build)

    def find(self, name: str, depends_on: Mapping[str, Any]) -> StoredArrays | None:
        """Return an entry's arrays, or None if it is missing. Raises ValueError if it is
        damaged."""
        if self.folder is None:
            return None
        return self._entry(self.folder, name, depends_on, None).open()

    @staticmethod
    def _entry(
        folder: Path, name: str, depends_on: Mapping[str, Any], layout: Layout | None
    ) -> _Entry:
        description = json.dumps(depends_on, sort_keys=True)
        return _Entry(folder / f"{name}-{digest(description)}", json.loads(description), layout)


@dataclass(frozen=True)
class _Entry:
    folder: Path
    depends_on: Mapping[str, Any]
    layout: Layout | None

    def open(self) -> StoredArrays | None:
        """Return the arrays, or None if the entry is missing. Raises ValueError if damaged."""
        if not os.path.lexists(self.folder):
            return None
        if not self.folder.is_dir():
            raise _damaged(self.folder, "it is not a folder")
        try:
            digests = self._digests()
            arrays = _map_entry(self.folder)
        except OSError as error:
            # As an OSError, this would be mistaken for a folder that is not writable.
            raise ValueError(
                f"the index cache entry {self.folder} cannot be read ({error.strerror or error}): "
                "let the user of this run read its files, or delete that folder, and the next run "
                "builds it again"
            ) from error
        for name in sorted(set(digests) ^ set(arrays)):
            state = "missing" if name in digests else "not of this entry"
            raise _damaged(self.folder, f"{name}.npy is {state}")
        for name, array in arrays.items():
            if self.layout is not None and name not in self.layout:
                raise _damaged(self.folder, f"{name}.npy is not of this entry")
            dtype, shape = (self.layout or {}).get(name, (array.dtype, array.shape))
            if (array.dtype, array.shape) != (dtype, shape):
                raise _damaged(
                    self.folder,
                    f"{name}.npy contains {array.dtype} of shape {array.shape}, not {dtype} of "
                    f"shape {shape}",
                )
            if digest_of(array) != digests[name]:
                raise _damaged(self.folder, f"the checksum of {name}.npy is wrong")
        missing = sorted(set(self.layout or ()) - set(arrays))
        if missing:
            raise _damaged(self.folder, f"{', '.join(missing)}.npy is missing")
        return arrays

    def _digests(self) -> Mapping[str, str]:
        try:
            content = json.loads((self.folder / DESCRIPTION).read_bytes())
        except FileNotFoundError:
            raise _damaged(self.folder, f"{DESCRIPTION} is missing") from None
        except (ValueError, RecursionError) as error:
            raise _damaged(self.folder, f"{DESCRIPTION} is not JSON ({error})") from None
        if not isinstance(content, dict) or not isinstance(content.get("digests"), dict):
            raise _damaged(self.folder, f"{DESCRIPTION} names no arrays")
        if content.get("depends_on") != self.depends_on:
            raise _damaged(self.folder, f"{DESCRIPTION} describes another entry")
        return content["digests"]

    def publish(self, built: Built) -> StoredArrays:
        part = self.folder.with_name(f"{self.folder.name}.partial-{uuid.uuid4().hex}")
        part.mkdir()
        try:
            digests = {}
            for name, array in _pairs(built):
                file = part / f"{name}.npy"
                _write_array(file, array)
                digests[name] = digest_of(_map_array(file))
                del array  # freed before the next one is built
            with naming(part / DESCRIPTION), (part / DESCRIPTION).open("w") as text:
                json.dump({"depends_on": self.depends_on, "digests": digests}, text, indent=1)
                sync(text)
            os.rename(part, self.folder)
        except OSError:
            # Without locks another process may have published the same entry first.
            arrays = self.open()
            if arrays is None:
                raise
            return arrays
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return _map_entry(self.folder)


def digest_of(array: np.ndarray) -> str:
    """Return a digest of shape, dtype and content (up to 64 evenly spaced blocks of 1 MiB)."""
    return digest_of_parts(chain((f"{array.dtype.str}{array.shape}",), _some_blocks(array)))


def _some_blocks(array: np.ndarray) -> Iterator[memoryview]:
    raw = array.reshape(-1).view(np.uint8)
    blocks = -(-len(raw) // _DIGEST_BLOCK)
    read = min(blocks, _DIGEST_BLOCKS)
    for i in range(read):
        start = i * (blocks - 1) // max(read - 1, 1) * _DIGEST_BLOCK
        yield np.ascontiguousarray(raw[start : start + _DIGEST_BLOCK]).data


def _pairs(built: Built) -> Iterable[tuple[str, np.ndarray | Blocks]]:
    return built.items() if isinstance(built, Mapping) else built


def _in_memory(build: Callable[[], Built]) -> StoredArrays:
    arrays = {}
    for name, array in _pairs(build()):
        if isinstance(array, Blocks):
            whole, row = np.empty(array.shape, array.dtype), 0
            for block in array.blocks:
                whole[row : row + len(block)] = block
                row += len(block)
            array = whole
        arrays[name] = array
    return StoredArrays(arrays)


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"the index cache entry {folder} is damaged: {what}. Check the disk, delete that folder, "
        "and the next run builds it again"
    )


def _map_entry(entry: Path) -> StoredArrays:
    files = sorted(file for file in entry.iterdir() if file.suffix == ".npy")
    try:
        return StoredArrays({file.stem: _map_array(file) for file in files}, entry)
    except ValueError as error:
        raise _damaged(entry, str(error)) from None


def _write_array(file: Path, array: np.ndarray | Blocks) -> None:
    blocks = array.blocks if isinstance(array, Blocks) else (array,)
    with naming(file), file.open("wb") as stream:
        header = np.lib.format.header_data_from_array_1_0(np.empty(0, array.dtype))
        np.lib.format.write_array_header_1_0(stream, header | {"shape": array.shape})
        rows = 0
        for block in blocks:
            # np.save reports neither a full disk nor the file's name.
            stream.write(np.ascontiguousarray(block, array.dtype).data)
            rows += len(block)
        assert rows == array.shape[0]
        sync(stream)


def _map_array(file: Path) -> np.ndarray:
    if file.is_fifo():  # opening a FIFO would wait for a writer
        raise ValueError(f"{file.name} is not a file")
    try:
        array: np.memmap = np.lib.format.open_memmap(file, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy raises many types for damaged files
        raise ValueError(f"{file.name} is not a NumPy file ({error})") from None
    expected = array.offset + array.nbytes
    size = file.stat().st_size
    if size != expected:
        raise ValueError(f"{file.name} has {size} bytes, not {expected}")
    return array


@contextmanager
def single_writer(entry: Path) -> Iterator[None]:
    """Let only one process at a time run the block for an `entry`, which need not exist. Raises
    OSError if the lock file next to the entry cannot be created."""
    path = f"{entry}.lock"
    try:
        lock = Lock(path, _SECONDS_BEFORE_SAYING_SO)
    except LockTakenError:
        logger.info("waiting for another process that builds %s", entry.name)
        lock = Lock(path, -1)
    with lock:
        yield


def find_numba() -> ModuleType | None:
    """Return the numba package, or None if it is not installed."""
    try:
        import numba
    except ImportError:
        return None
    return numba
