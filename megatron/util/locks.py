"""Files that one process at a time holds."""

from __future__ import annotations

import errno
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockTakenError(Exception):
    """Another process holds the lock."""


class Lock:
    """A file that this process holds until :meth:`release` or its end.

    The system takes it away from a process that is killed, so none is ever stale on the same host,
    and forked processes do not inherit it. Network file systems carry it to other hosts where they
    are set up to (NFS, GPFS, CephFS, Lustre with ``flock``); elsewhere two hosts do not see each
    other's. What the file holds is left alone.

    Args:
        path: the file; it is made if need be, and stays.
        wait_seconds: how long to wait for another process; without limit if negative.

    Raises:
        LockTakenError: another process holds it.
        OSError: the file cannot be made or written to.
    """

    missing: str | None = None
    """Why nothing is held, on a file system without locks."""

    def __init__(self, path: str | Path, wait_seconds: float = 0) -> None:
        with open(path, "ab"):
            pass  # with the permissions that files have here: others in a group can lock it too
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
        """Gives it back; nothing if that was done."""
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
