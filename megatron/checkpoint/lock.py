"""One run at a time saves into a folder."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.util.locks import Lock, LockTakenError

LOCK = ".lock"
_WAIT_SECONDS = 120.0
"""How long a lock of another host is waited for: a file server takes up to 90 s (the lease of NFS
4) to notice that its holder is gone."""
_HOLDER = "process {pid} on {host}"


def lock_folder(
    save: Path,
    say: Callable[[str], None] = lambda line: None,
    wait_seconds: float = _WAIT_SECONDS,
) -> Lock:
    """Takes the right to save into a folder; the file ``.lock`` there says who has it.

    Args:
        save: the folder; it is made if need be.
        say: called with a line for the user.
        wait_seconds: how long to wait for a holder on another host.

    Raises:
        CheckpointError: another run has it.
        OSError: the folder cannot be made or written to.
    """
    save.mkdir(parents=True, exist_ok=True)
    path, told, deadline = save / LOCK, False, time.monotonic() + wait_seconds
    while True:
        try:
            lock = Lock(path)
            break
        except LockTakenError:
            holder = path.read_text().strip() or "another process"
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
    if lock.missing:
        say(f"{path}: this file system has no locks ({lock.missing}), so nothing keeps another "
            "run from saving there")  # fmt: skip
    path.write_text(f"{_HOLDER.format(pid=os.getpid(), host=socket.gethostname())}\n")
    return lock
