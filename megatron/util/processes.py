"""System processes: which one reports for a run, how they die, their memory and their cores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from contextvars import ContextVar
from pathlib import Path

ends_with_run: ContextVar[bool] = ContextVar("ends_with_run", default=False)
"""True if this process ends as soon as its run has ended."""
_PARENT_DEATH_SIGNAL = 1
"""Value of Linux's ``PR_SET_PDEATHSIG``."""


def is_main_process() -> bool:
    """Return whether this process prints and writes on behalf of all ranks."""
    return os.environ.get("RANK", "0") == "0"


def die_with_parent() -> None:
    """Make the system kill this forked process when the thread that forked it ends, even if this
    process is stopped. Only effective on Linux."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def death(exit_code: int | None) -> str:
    """Return a description, for a message, of how a process died. The sender of SIGKILL is unknown,
    so the text mentions the most common one: the kernel when memory runs out."""
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
    """Make glibc reuse the memory of large tensors. By default it returns each freed block of a few
    megabytes to the system, and the next logits cause page faults for all of it again. On a CPU
    with a vocabulary of 50,000, this takes a tenth to a quarter of each step."""
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 2**30)
        mallopt(trim_threshold, 2**31 - 1)


def return_freed_memory() -> None:
    """Give memory that glibc keeps for later allocations back to the system. After a checkpoint was
    read, this is more than an evaluation needs."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: 0)(0)


def core_order(core: int) -> tuple[int, int, int]:
    """Return a sort key that groups cores by processor, and hardware threads by core."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package, number = (folder / name for name in ("physical_package_id", "core_id"))
        return int(package.read_text()), int(number.read_text()), core
    except OSError:
        return 0, core, core
