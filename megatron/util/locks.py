"""Files that one process at a time has locked. Apart from ``files.py``, since importing filelock
takes 50 ms."""

from __future__ import annotations

import errno
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

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
    """Why nothing is locked, on a file system without locks."""

    def __init__(self, path: str | Path, wait_seconds: float = 0) -> None:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
