"""Arrays that are built once and then memory-mapped from a folder.

An entry is a folder `<name>-<hash of all it depends on>/` with one .npy file per array and a
`description.json` that says what it was built from. It is built under a temporary name and appears
by one rename, so readers see it whole or not at all; a lock keeps other processes, on this node or
others, waiting instead of building the same again. Where a file system has no locks, several may
build and the first one to finish wins. No process group is needed: a single process may build it
beforehand.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

DESCRIPTION = "description.json"
_SECONDS_BEFORE_SAYING_SO = 5.0
_DIGEST_BLOCK = 1 << 20
_DIGEST_BLOCKS = 64


class StoredArrays(Mapping[str, np.ndarray]):
    """Named arrays; those of a cache entry are memory-mapped and pickle as their folder's path."""

    def __init__(self, arrays: Mapping[str, np.ndarray], folder: Path | None = None) -> None:
        self._arrays = dict(arrays)
        self._folder = folder

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
    """A folder of built arrays; `folder` None keeps everything in memory."""

    folder: Path | None
    required: bool = False
    """Whether a folder that cannot be written is an error (the user named it) or a warning."""

    @classmethod
    def beside(cls, prefix: str, data_cache_path: str | None) -> IndexCache:
        """The folder that `--data-cache-path` names, else `index-cache/` beside the data."""
        if data_cache_path is not None:
            return cls(Path(data_cache_path), required=True)
        return cls(Path(prefix).absolute().parent / "index-cache")

    def arrays(
        self,
        name: str,
        depends_on: Mapping[str, Any],
        build: Callable[[], Mapping[str, np.ndarray]],
    ) -> StoredArrays:
        """The arrays of entry `name`, built by `build()` if they are not there or damaged.

        Args:
            name: start of the entry's folder name, for people.
            depends_on: everything the arrays depend on, as JSON values.

        Raises:
            OSError: the folder is required and cannot be written.
        """
        if self.folder is None:
            return StoredArrays(build())
        description = json.dumps(depends_on, sort_keys=True)
        digest = hashlib.blake2b(description.encode(), digest_size=16).hexdigest()
        entry = self.folder / f"{name}-{digest}"
        found = _checked(entry)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _single_writer(entry):
                return _checked(entry) or _publish(entry, depends_on, build())
        except OSError as error:
            problem = f"cannot write the index cache {self.folder} ({error.strerror or error})"
            if self.required:
                raise OSError(
                    error.errno,
                    f"--data-cache-path: {problem}; give a folder that every process can write, "
                    "or build the indices beforehand with a user who may",
                ) from error
            logger.warning(
                "%s: building %s in the memory of every process; give --data-cache-path a folder "
                "that can be written to build it once",
                problem,
                name,
            )
            return StoredArrays(build())


def _publish(
    entry: Path, depends_on: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> StoredArrays:
    part = entry.with_name(f"{entry.name}.partial-{uuid.uuid4().hex}")
    part.mkdir()
    try:
        for name, array in arrays.items():
            with (part / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                _sync(file)
        sums = {name: _digest(np.asarray(array)) for name, array in arrays.items()}
        with (part / DESCRIPTION).open("w") as text:
            json.dump({"depends_on": depends_on, "digests": sums}, text, indent=1)
            _sync(text)
        if entry.exists():  # damaged, or its checksums would have matched
            damaged = entry.with_name(f"{entry.name}.damaged-{uuid.uuid4().hex}")
            os.rename(entry, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        os.rename(part, entry)
    except OSError:
        # Without locks another process may have published first: its entry is as good as ours.
        found = _checked(entry)
        if found is None:
            raise
        return found
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return _map_entry(entry)


def _map_entry(entry: Path) -> StoredArrays:
    files = sorted(entry.glob("*.npy"))
    return StoredArrays({file.stem: _map_array(file) for file in files}, entry)


def _map_array(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError:
        # NumPy maps no array of size 0; anything else that cannot be mapped fails here too.
        return np.load(file, allow_pickle=False)


def _checked(entry: Path) -> StoredArrays | None:
    """The entry's arrays, or None when it is missing or damaged."""
    if not entry.is_dir():
        return None
    try:
        digests = json.loads((entry / DESCRIPTION).read_text())["digests"]
        arrays = _map_entry(entry)
        if {name: _digest(array) for name, array in arrays.items()} == digests:
            return arrays
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass
    logger.warning("the index cache entry %s is damaged: building it again", entry)
    return None


def _digest(array: np.ndarray) -> str:
    """Of shape, dtype and content; of large arrays, evenly spaced blocks up to 64 MiB."""
    digest = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=16)
    raw = array.reshape(-1).view(np.uint8)
    blocks = -(-len(raw) // _DIGEST_BLOCK)
    looked_at = min(blocks, _DIGEST_BLOCKS)
    for i in range(looked_at):
        start = i * (blocks - 1) // max(looked_at - 1, 1) * _DIGEST_BLOCK
        digest.update(np.ascontiguousarray(raw[start : start + _DIGEST_BLOCK]).data)
    return digest.hexdigest()


@contextmanager
def _single_writer(entry: Path) -> Iterator[None]:
    lock = FileLock(f"{entry}.lock")
    try:
        lock.acquire(timeout=_SECONDS_BEFORE_SAYING_SO)
    except Timeout:
        logger.info("waiting for another process that builds %s", entry.name)
        lock.acquire()
    except NotImplementedError:  # a file system without locks; publishing stands races
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
