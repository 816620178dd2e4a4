"""Files that appear completely or not at all, and reach the disk; files of folders that others
made; a file that only one process opens."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

MOST_BYTES = 1 << 30
"""Bytes of a file that is no data and no weights, at most."""
_SMALL_BYTES = 1 << 26
_MOST_INFLATION = 20
_WRITING_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
PARQUET_LIMITS: Any = {
    "buffer_size": 1 << 20,
    "thrift_string_size_limit": 1 << 26,
    "thrift_container_size_limit": 1 << 20,
}
"""Limit of what is read of a Parquet file's columns and of its footer at a time."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Adds the file's name to errors of the system that have none: those of writing, such as a full
    disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _WRITING_ERRORS:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """A temporary file in the folder of ``path``, which replaces it atomically when the block ends
    without an error. To survive a crash of the machine, call :func:`sync` in the block. Raises
    OSError if the file cannot be replaced."""
    part = path.with_name(f"{path.name}.partial-{os.urandom(16).hex()}{suffix}")
    try:
        with naming(path):
            yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Deletes the temporary files of :func:`replacing` that killed processes left in a folder or
    those in it, where no other process writes now."""
    for path in folder.rglob("*.partial-*"):
        path.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes or replaces a file atomically, on the disk. Raises OSError if it cannot be written;
    the old file stays."""
    with replacing(path) as part, part.open("xb") as file:
        file.write(content)
        sync(file)


def sync(file: IO[bytes] | IO[str]) -> None:
    """Flushes an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flushes a written file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read it. Raises OSError if it is none (a named pipe or a device would not
    end), or cannot be opened."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file of settings; errors as of :func:`open_regular`, also if it is larger
    than ``most``, which is more than any has."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            reason = f"it has {size:,} bytes, and at most {most:,} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read()


def check_inflation(packed: int, size: int, where: str) -> None:
    """Refuses a compressed piece of a file, of ``packed`` bytes, that says it has so many more that
    memory or disk may not suffice: weights and tokens hardly shrink. Raises ValueError, whose
    message begins with ``where``."""
    if size > max(_SMALL_BYTES, _MOST_INFLATION * packed):
        raise ValueError(
            f"{where} has {packed:,} bytes that are compressed from {size:,}, {_MOST_INFLATION} "
            "times as much or more: if it is to be trusted, unpack it first"
        )


def own_file(path: Path) -> Path:
    """The regular file that a name in a folder of others stands for, without links. A link is
    followed within the folder, and into the ``blobs`` of a snapshot in Hugging Face's cache. Raises
    ValueError if it leads elsewhere: there may be a file of this user, which a copy would give
    away."""
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
    """Another process has the lock."""


class Lock:
    """A locked file, until :meth:`release` or the end of this process.

    The system releases the lock of a killed process, and forked processes do not inherit it.
    Network file systems share it between hosts where they are configured to. The file is created if
    necessary, and stays; a negative ``wait_seconds`` has no limit. Raises LockTakenError if another
    process has the lock. Raises OSError if the file cannot be created or written to.
    """

    missing: str | None = None
    """Reason why nothing is locked, on a file system without locks."""

    def __init__(self, path: str | Path, wait_seconds: float = 0) -> None:
        from filelock import FileLock, Timeout  # configurations need the standard library only

        with open(path, "ab"):
            pass  # with the default permissions, so that others in a group can lock it too
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
        """Releases the lock, if it has not been released."""
        self._lock.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.release()


def read_sections(file: Path) -> dict[str, dict[str, str]]:
    """The lines ``NAME ...: WORDS`` of a file of this project, by the section in which they are."""
    sections: dict[str, dict[str, str]] = {}
    for line in file.read_text().splitlines():
        names, colon, words = line.partition(": ")
        if line.startswith("["):
            sections[line.strip("[]")] = {}
        elif colon and not line.startswith("#"):
            next(reversed(sections.values()))[names] = words
    return sections
