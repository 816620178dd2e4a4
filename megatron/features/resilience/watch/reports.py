"""Report of a rank about itself, sent when another rank asks why the run does not advance."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.features.resilience.watch.processes import (
    awaited_file,
    call_site,
    device_is_busy,
    failed_to_meet,
    outwards,
    process_space,
    state_of,
    where_it_waits,
)
from megatron.util.errors import RESTART_STATUS, FaultError, one_line
from megatron.util.phases import Activity, background
from megatron.util.secrets import Redactor

_MOST_FRAMES = 60
_OURS = "/megatron/"


@dataclass(frozen=True)
class Report:
    """State of one rank.

    Attributes:
        idle: ticks of its watchdog since it last advanced.
        limit: allowed ticks without progress in its current phase; 0 for no limit.
        waits: True if it waits for other ranks.
        device: True if its device has not finished the queued work. This may be a transfer in
            which other ranks do not take part, because a rank with a GPU queues transfers and
            rarely waits for them on the CPU.
        space: namespace in which its process id is valid.
        site: call in which it waits, or function in which it works.
        waited_for: files and data loader processes for which it waits.
        error: error that ends the rank, or an empty string.
        lost: True if ``error`` was raised because other ranks did not respond.
        status: exit code for the error.
        stacks: stacks of its threads.
    """

    rank: int
    host: str
    pid: int
    phase: str
    detail: str
    iteration: int
    idle: int
    limit: int
    waits: bool
    site: str
    waited_for: str = ""
    saved: str = ""
    error: str = ""
    lost: bool = False
    status: int = 0
    stacks: str = ""
    device: bool = False
    space: str = ""

    @property
    def name(self) -> str:
        """Rank with its host and process id."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        """Current phase and iteration."""
        where = f"phase {self.phase}"
        if self.iteration:
            where += f" at iteration {self.iteration}"
        return where

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Report:
        return cls(**found)


@dataclass(frozen=True)
class Silent:
    """Rank that does not answer, with its last heartbeat. ``state`` is the state of its process, as
    seen by a rank in the same ``space``."""

    rank: int
    host: str
    pid: int
    phase: str
    iteration: int
    state: str = ""
    space: str = ""

    @property
    def name(self) -> str:
        return (
            f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank}"
        )


def report_of(
    activity: Activity,
    rank: int,
    idle: int,
    limit: int,
    without: Collection[int | None] = (),
    error: Exception | None = None,
    thread: int | None = None,
) -> Report:
    """Return the report of this process's main thread, or of another ``thread``.

    Args:
        idle, limit: see :class:`Report`.
        without: threads whose stacks are left out.
        error: error that ends the thread; None if it has not failed."""
    frames = sys._current_frames()
    main = threading.main_thread().ident or 0
    watched = main if thread is None else thread
    frame = frames.get(watched)
    seen = frames if thread is None else {main: frame} if frame is not None else {}
    waiting = where_it_waits(seen)
    lost = error is not None and failed_to_meet(error)
    return Report(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=activity.phase,
        detail=activity.detail,
        iteration=activity.iteration,
        idle=idle,
        limit=limit,
        waits=waiting is not None,
        site=call_site(waiting) if waiting is not None else _working_site(frame),
        waited_for="" if waiting is not None else _waited_for(activity, watched),
        saved=activity.saved,
        error="" if error is None else one_line(str(error) or repr(error)),
        lost=lost,
        status=_status(error),
        stacks=stacks_of(frames, without),
        device=thread is None and device_is_busy(),
        space=process_space(),
    )


def _status(error: Exception | None) -> int:
    """Return the exit code for an error."""
    if error is None or isinstance(error, FaultError):
        return RESTART_STATUS
    return 2 if isinstance(error, (ValueError, OSError)) else 1


def _waited_for(activity: Activity, watched: int) -> str:
    """Return the files and data loader processes for which a thread waits. Background threads are
    included, because the main thread may wait for one of them, such as a save."""
    idents = {thread.ident: thread.native_id for thread in threading.enumerate()}
    # in a forked process, Python reports the parent's native id
    idents[threading.main_thread().ident] = os.getpid()
    threads = [idents.get(ident) for ident in (watched, *list(background))]
    files = (awaited_file(os.getpid(), thread) for thread in threads if thread is not None)
    files_waited = list(dict.fromkeys(file for file in files if file is not None))
    for pid in activity.helpers() if activity.helpers is not None else ():
        files_waited.append(f"process {pid} of --num-workers, which {state_of(pid)}")
    return ", ".join(files_waited)


def _working_site(frame: FrameType | None) -> str:
    """Return the function that a thread is in, and the function of this project that called it."""
    if frame is None:
        return ""
    own = next((f for f in outwards(frame) if _OURS in f.f_code.co_filename), None)
    inner = f"{frame.f_code.co_name} in {_short(frame.f_code.co_filename)}:{frame.f_lineno}"
    if own is None or own is frame:
        return inner
    file = _short(own.f_code.co_filename)
    return f"{inner}, called from {file}:{own.f_lineno} {own.f_code.co_name}"


def _short(file: str) -> str:
    for part in ("/site-packages/", "/lib/python", _OURS):
        before, middle, after = file.rpartition(part)
        if middle:
            return f"megatron/{after}" if part == _OURS else after
    return file


def stacks_of(frames: Mapping[int, FrameType], without: Collection[int | None] = ()) -> str:
    """Return the stack of each thread, innermost call first. Source files are not read, because
    storage may hang."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    first = threading.main_thread().ident
    for ident in sorted(frames, key=lambda ident: ident != first):
        if ident in without:
            continue
        lines.append(f"  thread {names.get(ident, 'of another library')}:")
        for number, frame in enumerate(outwards(frames[ident])):
            if number == _MOST_FRAMES:
                lines.append("    ...")
                break
            code = frame.f_code
            lines.append(f"    {_short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
    return "\n".join(lines)


COLLECTIVES = "collectives"
"""Folder in ``--save`` with a pickle ``rank_N`` per rank. ``torchfrtrace`` reads those of NCCL."""
_RECORDED = "2000"  # maximum number of recorded collectives per rank
_SECONDS = 5.0  # time limit for writing reports, because storage may be what hangs


def described(reports: Mapping[int, Report], silent: Sequence[Silent]) -> str:
    """Describe the activity of each rank, with its stacks. Silent ranks come first."""
    lines = []
    for one in silent:
        state = f"its process {one.state}" if one.state else "nothing is known of its process"
        last = f"last seen in phase {one.phase} at iteration {one.iteration}"
        lines.append(f"{one.name} does not answer: {state}; {last}")
    for rank in sorted(reports):
        report = reports[rank]
        does = "waits for other ranks in" if report.waits else "works in"
        if report.device:
            does = f"has a device that is busy, and {does}"
        detail = f" ({report.detail})" if report.detail else ""
        lines.append(
            f"{report.name}: {report.place}{detail}, {report.idle} s without progress; it {does} "
            f"{report.site}"
        )
        if report.waited_for:
            lines.append(f"  it waits for {report.waited_for}")
        if report.error:
            lines.append(f"  it ends by an error: {report.error}")
        lines.append(report.stacks)
    return "\n".join(lines)


def write_report(line: str, body: str, save: str | None) -> None:
    """Write ``line`` and ``body`` to stderr and, if ``save`` and ``body`` are given, to
    ``hang-<time>.txt`` in the folder ``save``. Writing is given up after a time limit."""

    def show() -> None:
        print(f"{line}\n{body}" if body else line, file=sys.stderr, flush=True)

    def store() -> None:
        folder = Path(save or "")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            shown = Redactor(os.environ).text(f"{line}\n\n{body}\n")
            file.write_text(shown, encoding="utf-8")

    works = [show, store] if save is not None and body else [show]
    in_time(*works)


def in_time(*works: Callable[[], None]) -> None:
    """Call functions concurrently. Return when all are done, or after a time limit."""
    threads = [threading.Thread(target=work, name="report", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def record_collectives(save: str | None) -> None:
    """Make NCCL record its collectives and write them to :data:`COLLECTIVES` after a timeout. Keeps
    environment variables that are set. Call this before the first process group is created."""
    import torch

    if not torch.cuda.is_available():
        return
    wanted = {"TORCH_FR_BUFFER_SIZE": _RECORDED, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if save is not None:
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = str(_record_of(save, ""))
        with contextlib.suppress(OSError):  # the first save reports the error
            _record_of(save, "").parent.mkdir(parents=True, exist_ok=True)
    for name, value in wanted.items():
        if not any(known in os.environ for known in (name, *_OLDER_NAMES.get(name, ()))):
            os.environ[name] = value


_OLDER_NAMES = {
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
}
"""Older names that torch still accepts. It warns if both names are set."""


def write_collectives(save: str, rank: int) -> None:
    """Write the collectives that this rank has recorded to :data:`COLLECTIVES`."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as library

    if not dist.is_initialized():
        return
    nccl = dist.get_backend() == dist.Backend.NCCL
    dump = getattr(library, "_dump_nccl_trace" if nccl else "_dump_fr_trace")

    def store() -> None:
        file = _record_of(save, rank)
        with contextlib.suppress(OSError, RuntimeError):
            file.parent.mkdir(parents=True, exist_ok=True)
            # Stacks would take seconds, and load libraries from storage, which may be what hangs.
            file.write_bytes(dump(includeStackTraces=False))

    # The dump queries the state of the device while it holds the interpreter's lock. If the driver
    # does not answer, only faulthandler's thread, which needs no lock, can end the process.
    faulthandler.dump_traceback_later(2 * _SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    in_time(store)
    faulthandler.cancel_dump_traceback_later()


def _record_of(save: str, rank: int | str) -> Path:
    return Path(save).absolute() / COLLECTIVES / f"rank_{rank}"
