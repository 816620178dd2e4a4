"""One run at a time saves into a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.files import CheckpointError

LOCK = ".lock"
_WAIT_SECONDS = 120.0
"""How long a lock of another host is waited for: a file server takes up to 90 s (the lease of NFS
4) to notice that its holder is gone."""
_HOLDER = "process {pid} on {host}"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """The right to save into a folder, held until :meth:`release` or the end of the process.

    It is a POSIX record lock on the file ``.lock``: the system takes it away from a process that is
    killed, so none is ever stale on the same host, and worker processes do not inherit it. Network
    file systems carry it to other hosts, where they are set up to (NFS, GPFS, CephFS, Lustre with
    ``flock``); elsewhere two hosts do not see each other's.

    Args:
        save: the folder; it is made if need be.
        say: called with a line for the user.
        wait_seconds: how long to wait for a holder on another host.

    Raises:
        CheckpointError: another run has it.
        OSError: the folder cannot be made or written to.
    """

    def __init__(
        self,
        save: Path,
        say: Callable[[str], None] = lambda line: None,
        wait_seconds: float = _WAIT_SECONDS,
    ) -> None:
        save.mkdir(parents=True, exist_ok=True)
        self._file = open(save / LOCK, "a+")  # noqa: SIM115 (held beyond this function)
        try:
            self._acquire(save, say, time.monotonic() + wait_seconds)
            self._file.truncate(0)
            self._file.write(f"{_HOLDER.format(pid=os.getpid(), host=socket.gethostname())}\n")
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def _acquire(self, save: Path, say: Callable[[str], None], deadline: float) -> None:
        told = False
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    say(f"{save / LOCK}: this file system has no locks ({error.strerror}), so "
                        "nothing keeps another run from saving there")  # fmt: skip
                    return
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            if holder.endswith(f" on {socket.gethostname()}") or time.monotonic() > deadline:
                raise CheckpointError(
                    f"--save {save}: {holder} is saving there ({LOCK}); two runs would take each "
                    "other's checkpoints away: end that one, or give another --save"
                )
            if not told:
                say(f"--save {save}: waiting for {holder}, or for the file server to notice that "
                    "it is gone")  # fmt: skip
                told = True
            time.sleep(1)

    def release(self) -> None:
        """Gives it back; nothing if that was done."""
        self._file.close()
