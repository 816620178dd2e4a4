"""What a rank says of itself when somebody asks why the run does not advance."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron.features.resilience.process_states import (
    awaited_file,
    process_space,
    state_of,
)
from megatron.features.resilience.waiting import (
    call_site,
    device_is_busy,
    failed_to_meet,
    outwards,
    where_it_waits,
)
from megatron.util.errors import RESTART_STATUS, FaultError, one_line
from megatron.util.phases import Activity, background

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
        waited_for: what it waits for beside ranks: a file, or processes that read data.
        error: the error by which it ends, if it does.
        lost: whether that error is that others did not answer it.
        status: the exit status that its own error means.
        stacks: those of its threads.
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


def report_of(
    activity: Activity,
    rank: int,
    idle: int,
    limit: int,
    without: Collection[int | None] = (),
    error: Exception | None = None,
    thread: int | None = None,
) -> Report:
    """What this process says of the activity of its main thread, or of another ``thread``.

    Args:
        without: threads whose stacks are left out.
        error: by which it ends.
    """
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
    found = list(dict.fromkeys(file for file in files if file is not None))
    for pid in activity.helpers() if activity.helpers is not None else ():
        found.append(f"process {pid} of --num-workers, which {state_of(pid)}")
    return ", ".join(found)


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
        before, found, after = file.rpartition(part)
        if found:
            return f"megatron/{after}" if part == _OURS else after
    return file


def stacks_of(frames: Mapping[int, FrameType], without: Collection[int | None] = ()) -> str:
    """The calls of each thread, the innermost first; without source lines, because the storage on
    which they are may be what does not answer."""
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
