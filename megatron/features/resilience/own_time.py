"""How long this process computes and reads for its steps, without what it waits for other ranks.

On a CPU all ranks' steps take equally long, as each waits for the slowest. A thread therefore looks
at the main thread some times a second. On a GPU, where the main thread is ahead of the device, a
product of matrices that the device computes now and then says how fast it is.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import NamedTuple

from megatron.features.resilience.waiting import frames_of_others, where_it_waits
from megatron.util.errors import monitor_thread
from megatron.util.phases import activity

PERIOD = 0.3
"""Seconds from one look at the main thread to the next. To wake up and look costs a tenth of a
millisecond of a processor, twice that where processes share one."""

_LATE = 0.02
"""Seconds beyond the period that the thread may wake up late on a busy machine."""

_DEVICE_WAITS = "/torch/cuda/streams.py"
"""Where the main thread waits for its device."""


class OwnTime(NamedTuple):
    """Seconds of this process; the last two are parts of ``own``, and 0 where they are not known.

    Attributes:
        own: that were not spent waiting for other ranks.
        reading: of them, waiting for the next batch.
        unscheduled: of them, stopped, or ready to run on a processor that others had.
    """

    own: float = 0.0
    reading: float = 0.0
    unscheduled: float = 0.0


class OwnTimeMeter:
    """Measures :class:`OwnTime` in a thread of its own, while the main thread is in a step: from
    :meth:`resume` to :meth:`pause`.

    The thread looks at random intervals, or steps that are as long as one of these would always be
    seen in the same place. Where it wakes up late the process was stopped, had no processor, or
    held the interpreter's lock: none of that is waiting for others.
    """

    def __init__(self, period: float = PERIOD) -> None:
        self._period, self._random = period, random.Random(0)
        self._counting = self._closed = False
        self._own = self._reading = self._late = 0.0
        """Since the beginning; only the thread writes them."""
        self._taken = OwnTime(0.0, 0.0, 0.0)
        self._run_delay = _run_delay()
        self._thread: threading.Thread | None = None

    def resume(self) -> None:
        """A step begins."""
        self._counting = True
        if self._thread is None:  # after the processes that read data were forked
            lost = "this rank can no longer be found to be slow"
            self._thread = monitor_thread(self._look, "own time", lost)
            self._thread.start()

    def pause(self) -> None:
        """The step has ended."""
        self._counting = False

    def take(self) -> OwnTime:
        """What was measured since the last call."""
        total, before = OwnTime(self._own, self._reading, self._late), self._taken
        self._taken = total
        delay, self._run_delay = self._run_delay, _run_delay()
        own, reading, late = (now - then for now, then in zip(total, before, strict=True))
        return OwnTime(own, reading, min(own, max(late, self._run_delay - delay)))

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _look(self) -> None:
        before = time.monotonic()
        while True:
            pause = self._period * self._random.uniform(0.5, 1.5)
            time.sleep(pause)  # an event with a timeout costs a quarter more
            if self._closed:
                return
            now = time.monotonic()
            passed, before = now - before, now
            if not self._counting:
                continue
            late = max(0.0, passed - pause - _LATE)
            if _waits():
                self._own, self._late = self._own + late, self._late + late
                continue
            self._own, self._late = self._own + passed, self._late + late
            if activity.phase == "data":
                self._reading += passed - late


def _waits() -> bool:
    """Whether the main thread waits for other ranks or its device. A function of its own, as frames
    keep the tensors of calls that have returned meanwhile."""
    frames = frames_of_others()
    main = frames[threading.main_thread().ident or 0]
    waits = where_it_waits(frames) is not None
    return waits or main.f_code.co_filename.endswith(_DEVICE_WAITS)


def _run_delay() -> float:
    """Seconds that the main thread has been ready to run and had no processor, where Linux counts
    them; 0 elsewhere."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
