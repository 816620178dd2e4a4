"""Arrays that are built once and then memory-mapped from a folder.

An entry is a folder `<name>-<hash of all it depends on>/` with one .npy file per array and a
`description.json` that says what it was built from. It is built under a temporary name and appears
by one rename, so readers see it whole or not at all; a lock keeps other processes, on this node or
others, waiting instead of building the same again. Where a file system has no locks, several may
build and the first one to finish wins. No process group is needed: a single process may build it
beforehand.

A damaged entry is refused, not built again: whatever damaged it may have damaged other files, and
nothing that a run wrote itself looks like that.
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
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.array_file import Blocks, digest_of, map_array, write_array
from megatron.util.digests import digest
from megatron.util.files import sync
from megatron.util.locks import Lock, LockTakenError

logger = logging.getLogger(__name__)

DESCRIPTION = "description.json"
_SECONDS_BEFORE_SAYING_SO = 5.0


Built = Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray | Blocks]]
"""Arrays by name. Pairs are asked for one after the other, so that one array can be let go before
the next one is made."""
Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
"""What arrays have to be: dtype and shape by name."""


class StoredArrays(Mapping[str, np.ndarray]):
    """Named arrays; those of a cache entry are memory-mapped and pickle as their folder's path."""

    def __init__(self, arrays: Mapping[str, np.ndarray], folder: Path | None = None) -> None:
        self._arrays = dict(arrays)
        self._folder = folder

    def damaged(self, what: str) -> ValueError:
        """The error for content that cannot be right."""
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
    """A folder of built arrays; `folder` None keeps everything in memory."""

    folder: Path | None
    required: bool = False
    """Whether a folder that cannot be written is an error (the user named it) or a warning."""

    @classmethod
    def beside(cls, prefix: str, data_cache_path: str | None) -> IndexCache:
        """The folder that `--data-cache-path` names, else `index-cache/` beside the data.

        Of a pattern that is beside the first part with a wildcard, of data elsewhere (s3://...) in
        the working directory.
        """
        if data_cache_path is not None:
            return cls(Path(data_cache_path), required=True)
        if "://" in prefix:
            return cls(Path("index-cache").absolute())
        path = Path(prefix).absolute()
        pattern = next((part for part in path.parents[::-1] if has_magic(part.name)), path)
        return cls(pattern.parent / "index-cache")

    def arrays(
        self,
        name: str,
        depends_on: Mapping[str, Any],
        build: Callable[[], Built],
        layout: Layout | None = None,
    ) -> StoredArrays:
        """The arrays of entry `name`, built by `build()` if they are not there.

        Args:
            name: start of the entry's folder name, for people.
            depends_on: everything the arrays depend on, as JSON values.
            layout: what the arrays have to be, where that is known.

        Raises:
            ValueError: the entry is damaged or cannot be read; the message names the folder.
            OSError: the folder is required and cannot be written.
        """
        if self.folder is None:
            return _in_memory(build)
        description = json.dumps(depends_on, sort_keys=True)
        folder = self.folder / f"{name}-{digest(description)}"
        entry = _Entry(folder, json.loads(description), layout)
        found = entry.open()
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _single_writer(entry.folder):
                return entry.open() or entry.publish(build())
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
            return _in_memory(build)


@dataclass(frozen=True)
class _Entry:
    folder: Path
    depends_on: Mapping[str, Any]
    layout: Layout | None

    def open(self) -> StoredArrays | None:
        """The entry's arrays; None when it is not there.

        Raises:
            ValueError: see :meth:`IndexCache.arrays`.
        """
        if not os.path.lexists(self.folder):
            return None
        if not self.folder.is_dir():
            raise _damaged(self.folder, "it is no folder")
        try:
            digests = self._described()
            arrays = _map_entry(self.folder)
        except OSError as error:
            # No OSError: nothing must take it for a folder that cannot be written.
            raise ValueError(
                f"the index cache entry {self.folder} cannot be read ({error.strerror or error}): "
                "let the user of this run read its files, or delete that folder, and the next run "
                "builds it again"
            ) from error
        for name in sorted(set(digests) ^ set(arrays)):
            state = "missing" if name in digests else "not of this entry"
            raise _damaged(self.folder, f"{name}.npy is {state}")
        for name, array in arrays.items():
            if self.layout is not None:
                _check_layout(self.folder, name, array, self.layout)
            if digest_of(array) != digests[name]:
                raise _damaged(self.folder, f"the checksum of {name}.npy is wrong")
        if self.layout is not None and set(self.layout) != set(arrays):
            missing = ", ".join(sorted(set(self.layout) - set(arrays)))
            raise _damaged(self.folder, f"{missing}.npy is missing")
        return arrays

    def _described(self) -> Mapping[str, str]:
        path = self.folder / DESCRIPTION
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise _damaged(self.folder, f"{DESCRIPTION} is missing") from None
        except (ValueError, RecursionError) as error:
            raise _damaged(self.folder, f"{DESCRIPTION} is no JSON ({error})") from None
        if not isinstance(content, dict) or not isinstance(content.get("digests"), dict):
            raise _damaged(self.folder, f"{DESCRIPTION} names no arrays")
        if content.get("depends_on") != self.depends_on:
            raise _damaged(
                self.folder, f"{DESCRIPTION} describes another entry than its name stands for"
            )
        return content["digests"]

    def publish(self, built: Built) -> StoredArrays:
        """Write the arrays of an entry that is not there."""
        part = self.folder.with_name(f"{self.folder.name}.partial-{uuid.uuid4().hex}")
        part.mkdir()
        try:
            digests = {}
            for name, array in built.items() if isinstance(built, Mapping) else built:
                file = part / f"{name}.npy"
                write_array(file, array)
                digests[name] = digest_of(map_array(file))
                del array  # let it go before the next one is made
            with (part / DESCRIPTION).open("w") as text:
                json.dump({"depends_on": self.depends_on, "digests": digests}, text, indent=1)
                sync(text)
            os.rename(part, self.folder)
        except OSError:
            # Without locks another process may have published first: its entry is as good as ours.
            found = self.open()
            if found is None:
                raise
            return found
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return _map_entry(self.folder)


def _in_memory(build: Callable[[], Built]) -> StoredArrays:
    built = build()
    pairs = built.items() if isinstance(built, Mapping) else built
    return StoredArrays({n: a.array() if isinstance(a, Blocks) else a for n, a in pairs})


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"the index cache entry {folder} is damaged: {what}. Look whether the disk is sound, "
        "delete that folder, and the next run builds it again"
    )


def _check_layout(folder: Path, name: str, array: np.ndarray, layout: Layout) -> None:
    if name not in layout:
        raise _damaged(folder, f"{name}.npy is not of this entry")
    if (array.dtype, array.shape) != layout[name]:
        dtype, shape = layout[name]
        raise _damaged(
            folder,
            f"{name}.npy holds {array.dtype} of shape {array.shape}, not {dtype} of shape {shape}",
        )


def _map_entry(entry: Path) -> StoredArrays:
    files = sorted(file for file in entry.iterdir() if file.suffix == ".npy")
    try:
        return StoredArrays({file.stem: map_array(file) for file in files}, entry)
    except ValueError as error:
        raise _damaged(entry, str(error)) from None


@contextmanager
def _single_writer(entry: Path) -> Iterator[None]:
    path = f"{entry}.lock"
    try:
        lock = Lock(path, _SECONDS_BEFORE_SAYING_SO)
    except LockTakenError:
        logger.info("waiting for another process that builds %s", entry.name)
        lock = Lock(path, -1)
    with lock:
        yield
