"""The main process of a run; the ends of processes, their memory and their cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux."""


def is_main_process() -> bool:
    """True if this process prints and writes for all."""
    return os.environ.get("RANK", "0") == "0"


def die_with_parent() -> None:
    """In a forked process: the system kills it when the thread that forked it has ended, also while
    it is stopped. Only Linux does so."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def death(exit_code: int | None) -> str:
    """Return a description of how a process died, for a message. Of SIGKILL, which nobody can
    catch, the sender is not known: the system sends it when memory runs out."""
    if exit_code is None:
        return "closed its connection"
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if name == "SIGKILL":
        name += " (the system sends it when memory runs out; fewer processes need less)"
    return f"was killed by {name}"


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of large tensors for the next ones. By default it returns every
    freed block of some megabytes to the system, and the next logits fault in all their pages again:
    a tenth to a quarter of a step on a CPU at a vocabulary of 50,000."""
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)


def return_freed_memory() -> None:
    """Gives memory back to the system that glibc keeps for the next tensors: after a checkpoint was
    read it is more than an evaluation needs again."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def core_order(core: int) -> tuple[int, int, int]:
    """Sort key that makes cores of a processor, and the two threads of a core, neighbours."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package, number = (folder / name for name in ("physical_package_id", "core_id"))
        return int(package.read_text()), int(number.read_text()), core
    except OSError:
        return 0, core, core
