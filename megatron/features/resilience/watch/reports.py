"""Report of a rank about itself, when another asks why the run does not advance."""

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
    """One rank's.

    Attributes:
        idle: ticks of its watchdog since it has last advanced.
        limit: ticks after which that is too long where it works, 0 for no limit.
        waits: whether it waits for other ranks.
        device: whether its device has not done what was queued. That may be a transfer in which
            other ranks do not take part: a GPU's rank queues them and hardly ever waits itself.
        space: where its process id means something.
        site: the call in which it waits, or the function that works.
        waited_for: what it waits for next to ranks: a file, or processes that read data.
        error: the error by which it ends, if it does.
        lost: whether that error is that others did not answer it.
        status: the exit status that its own error means.
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
        """The rank with its machine and process."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        """Its phase and iteration."""
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
    """A rank that does not answer, with its last sign of life; ``state`` is that of its process, as
    a rank in the same ``space`` sees it."""

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
    """Report of this process's main thread, or of another ``thread``; ``error`` is that by which it
    ends."""
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
    """The exit status that an error ends a process with."""
    if error is None or isinstance(error, FaultError):
        return RESTART_STATUS
    return 2 if isinstance(error, (ValueError, OSError)) else 1


def _waited_for(activity: Activity, watched: int) -> str:
    """Also where the main thread waits for what another one does, such as a save."""
    idents = {thread.ident: thread.native_id for thread in threading.enumerate()}
    idents[threading.main_thread().ident] = os.getpid()  # in a fork Python has the parent's
    threads = [idents.get(ident) for ident in (watched, *list(background))]
    files = (awaited_file(os.getpid(), thread) for thread in threads if thread is not None)
    files_waited = list(dict.fromkeys(file for file in files if file is not None))
    for pid in activity.helpers() if activity.helpers is not None else ():
        files_waited.append(f"process {pid} of --num-workers, which {state_of(pid)}")
    return ", ".join(files_waited)


def _working_site(frame: FrameType | None) -> str:
    """The function that a thread is in, and the one of this project that it was called from."""
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
    """Calls of each thread, innermost first; no source lines, since their storage may hang."""
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
"""Folder in ``--save`` with a pickle ``rank_N`` of each rank; ``torchfrtrace`` reads NCCL's."""
_RECORDED = "2000"  # collectives of a rank
_SECONDS = 5.0  # for which it may take to be written; its storage may be what hangs


def described(reports: Mapping[int, Report], silent: Sequence[Silent]) -> str:
    """Return the activity of each rank, with its stacks; the silent ones first."""
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
    """Writes a line and what follows to the console and, with ``save``, to ``hang-<time>.txt``,
    without waiting long for either."""

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
    """Calls functions at the same time, and returns when they are done, or take too long."""
    threads = [threading.Thread(target=work, name="report", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def record_collectives(save: str | None) -> None:
    """Lets NCCL record its collectives, and write them to :data:`COLLECTIVES` at a timeout, unless
    the environment says otherwise. To be called before the first process group."""
    import torch

    if not torch.cuda.is_available():
        return
    wanted = {"TORCH_FR_BUFFER_SIZE": _RECORDED, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if save is not None:
        wanted["TORCH_FR_DUMP_TEMP_FILE"] = str(_record_of(save, ""))
        with contextlib.suppress(OSError):  # the first rank to save reports what is wrong with it
            _record_of(save, "").parent.mkdir(parents=True, exist_ok=True)
    for name, value in wanted.items():
        if not any(known in os.environ for known in (name, *_OLDER_NAMES.get(name, ()))):
            os.environ[name] = value


_OLDER_NAMES = {
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
}
"""Names that torch still reads; it warns of both."""


def write_collectives(save: str, rank: int) -> None:
    """Writes the collectives that this rank has recorded to :data:`COLLECTIVES`."""
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
            # Stacks would take seconds, and libraries that may be on the storage that hangs.
            file.write_bytes(dump(includeStackTraces=False))

    # The library asks the device for the state of its work, with the interpreter's lock held: only
    # a thread without it can end a process whose driver does not answer.
    faulthandler.dump_traceback_later(2 * _SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
    in_time(store)
    faulthandler.cancel_dump_traceback_later()


def _record_of(save: str, rank: int | str) -> Path:
    return Path(save).absolute() / COLLECTIVES / f"rank_{rank}"
