"""Current phase of this process, as the watchdog and other observers see it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

PHASES = ("start", "data", "step", "evaluation", "save", "end")
"""Names of the phases. ``start`` lasts from the start of the program to the end of the first step.
In ``data`` a rank waits for a batch, in ``step`` it computes a step, and in ``save`` it saves a
whole checkpoint. ``end`` is everything after the last step."""


@dataclass
class Activity:
    """Activity of a thread. ``moves`` increases with every change of phase and every call of
    :func:`moved`. While it does not increase, the thread is waiting or in a long computation.

    Attributes:
        detail: the object that the phase works on, such as a folder.
        helpers: returns the ids of the processes that the phase waits for.
        iteration: iteration of the step that is being computed.
        saved: the newest checkpoint of the run. Empty if none exists.
        give_up: reason to abandon the phase, such as data that do not arrive, if it can be
          abandoned. Set by the observer.
        device_busy: returns whether the process's GPU still has queued work. None without a
          GPU.
    """

    phase: str = "start"
    detail: str = ""
    helpers: Callable[[], Sequence[int]] | None = None
    iteration: int = 0
    moves: int = 0
    saved: str = ""
    give_up: str = ""
    device_busy: Callable[[], bool] | None = None


activity = Activity()
"""Activity of the main thread. Other threads read it."""

background: dict[int, Activity] = {}
"""Activities of other threads that are in a phase, such as a save, by thread identifier."""

background_groups: WeakSet[Any] = WeakSet()
"""Process groups in which background threads communicate. Their collectives say nothing about the
progress of the main thread."""


@contextlib.contextmanager
def phase(
    name: str, detail: str = "", helpers: Callable[[], Sequence[int]] | None = None
) -> Iterator[None]:
    """Put this thread into one of the :data:`PHASES` until the block ends. :class:`Activity`
    describes the other arguments."""
    own = _own()
    if own is None:
        ident = threading.get_ident()
        background[ident] = Activity(name, detail, helpers, activity.iteration)
        try:
            yield
        finally:
            del background[ident]
        return
    before = own.phase, own.detail, own.helpers
    own.phase, own.detail, own.helpers = name, detail, helpers
    own.moves += 1
    try:
        yield
    finally:
        own.phase, own.detail, own.helpers = before
        own.moves += 1


def moved(iteration: int | None = None) -> None:
    """Record progress within this thread's current phase, such as a finished micro batch. Pass
    ``iteration`` when the step of that iteration begins."""
    own = _own()
    if own is None:
        return
    if iteration is not None:
        own.iteration = iteration
    own.moves += 1


def ending() -> None:
    """Record that the last step is done. This thread is now in ``end`` outside of :func:`phase`."""
    own = _own()
    if own is not None:
        own.phase, own.detail, own.helpers = "end", "", None
        own.moves += 1


def _own() -> Activity | None:
    if threading.current_thread() is threading.main_thread():
        return activity
    return background.get(threading.get_ident())
