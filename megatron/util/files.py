"""Durable and safe file access: atomic writes that are flushed to the disk, reading of untrusted
files, and a lock that only one process can hold."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

MOST_BYTES = 1 << 30
"""Maximum size in bytes of a file that contains neither data nor weights, such as settings."""
_SMALL_BYTES = 1 << 26
_MOST_INFLATION = 20
_WRITING_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
PARQUET_LIMITS: Any = {
    "buffer_size": 1 << 20,
    "thrift_string_size_limit": 1 << 26,
    "thrift_container_size_limit": 1 << 20,
}
"""Limits on the bytes that are buffered or parsed at a time in an untrusted Parquet file."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Set the file name of write errors, such as a full disk, for which the system reports none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _WRITING_ERRORS:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """Yield a temporary file in the folder of ``path`` that atomically replaces ``path`` when the
    block ends without an error. Call :func:`sync` in the block if the file must survive a crash of
    the machine. Raises OSError if the file cannot be replaced."""
    part = path.with_name(f"{path.name}.partial-{os.urandom(16).hex()}{suffix}")
    try:
        with naming(path):
            yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Delete temporary files of :func:`replacing` that killed processes left in a folder or its
    subfolders. No other process may be writing there."""
    for path in folder.rglob("*.partial-*"):
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write or replace a file atomically and flush it to the disk. Raises OSError if the file
    cannot be written; an existing file then remains unchanged."""
    with replacing(path) as part, part.open("xb") as file:
        file.write(content)
        sync(file)


def sync(file: IO[bytes] | IO[str]) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a closed file, or a folder's directory entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError if the file cannot be opened, or is not a regular
    file: reading a named pipe or a device might never end."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a small file, such as settings. Raises OSError under the conditions of
    :func:`open_regular`, or if the file has more than ``most`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            reason = f"it has {size:,} bytes, and at most {most:,} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read()


def check_inflation(packed: int, size: int, where: str) -> None:
    """Raise ValueError if decompression from ``packed`` to ``size`` bytes could exhaust memory or
    disk. Weights and tokens hardly compress, so a high ratio is suspicious. The message begins with
    ``where``."""
    if size > max(_SMALL_BYTES, _MOST_INFLATION * packed):
        raise ValueError(
            f"{where} has {packed:,} bytes that are compressed from {size:,}, {_MOST_INFLATION} "
            "times as much or more: if it is to be trusted, unpack it first"
        )


def own_file(path: Path) -> Path:
    """Return the regular file that ``path`` refers to, with symbolic links resolved. The folder may
    be untrusted, so links may only point into the same folder, or into the ``blobs`` of a snapshot
    in Hugging Face's cache. Raises ValueError for any other target: copying it could expose a
    private file of the current user."""
    folder, target = path.parent.resolve(), path.resolve()
    inside = [folder]
    for each in (folder, *folder.parents):
        model = each.parent.parent
        if each.parent.name == "snapshots" and (each == folder or "--" in model.name):
            inside.append(model / "blobs")
    if not any(target.is_relative_to(each) for each in inside):
        raise ValueError(
            f"{path} is a link to {target}, outside of its folder, and is not copied: put the file "
            "itself there if it belongs to the folder"
        )
    if not stat.S_ISREG(os.lstat(target).st_mode):
        raise ValueError(f"{path} is not a regular file")
    return target


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockTakenError(Exception):
    """Raised because another process has the lock."""


class Lock:
    """File lock, held until :meth:`release` or the end of this process.

    The system releases the lock of a killed process, and forked processes do not inherit it.
    Network file systems share it between hosts if they are configured to. The file is created if
    necessary and never deleted. A negative ``wait_seconds`` waits without limit. Raises
    LockTakenError if another process holds the lock, OSError if the file cannot be written.
    """

    missing: str | None = None
    """Why nothing is locked, on a file system without locks. None if the lock is held."""

    def __init__(self, path: str | Path, wait_seconds: float = 0) -> None:
        from filelock import FileLock, Timeout  # importing this module must need no packages

        with open(path, "ab"):
            pass  # created with default permissions, so that group members can lock it too
        self._lock = FileLock(path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(timeout=wait_seconds)
        except Timeout:
            raise LockTakenError(str(path)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.missing = error.strerror

    def release(self) -> None:
        """Release the lock. Does nothing if it is already released."""
        self._lock.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release()


def read_sections(file: Path) -> dict[str, dict[str, str]]:
    """Return the ``NAME ...: WORDS`` lines of each ``[section]`` of a text file."""
    sections: dict[str, dict[str, str]] = {}
    for line in file.read_text().splitlines():
        names, colon, words = line.partition(": ")
        if line.startswith("["):
            sections[line.strip("[]")] = {}
        elif colon and not line.startswith("#"):
            next(reversed(sections.values()))[names] = words
    return sections
