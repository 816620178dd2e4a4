"""Current phase of this process, for those who watch it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

PHASES = ("start", "data", "step", "evaluation", "save", "end")
"""From the start of the program to the end of the first step; waiting for a batch; computing a
step; an evaluation; a checkpoint, from its beginning to its end on this rank; what remains to do
after the last step."""


@dataclass
class Activity:
    """Activity of a thread. ``moves`` grows with every change and every :func:`moved`: a thread in
    which it does not is waiting, or computing something long.

    Attributes:
        detail: what the phase works on, such as a folder.
        helpers: says which processes the phase waits for, by their ids.
        iteration: of the step that is computed.
        saved: the newest checkpoint of the run; empty without one.
        give_up: why a phase that can be given up shall be, such as that its data do not come; set
            by who watches.
        device_busy: says whether the process's GPU has not done all that was queued; None without
            a GPU.
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
"""Activity of the main thread; read by other threads."""

background: dict[int, Activity] = {}
"""Activities of other threads that are in a phase, such as a save, by their identifiers."""

background_groups: WeakSet[Any] = WeakSet()
"""Groups of processes in which such threads communicate: what happens there moves no other
group."""


@contextlib.contextmanager
def phase(
    name: str, detail: str = "", helpers: Callable[[], Sequence[int]] | None = None
) -> Iterator[None]:
    """Says that this thread is in one of :data:`PHASES` until the block ends; for the rest see
    :class:`Activity`."""
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
    """Says that the phase of this thread advances, such as by a micro batch; ``iteration`` is that
    of the step which is computed later."""
    own = _own()
    if own is None:
        return
    if iteration is not None:
        own.iteration = iteration
    own.moves += 1


def ending() -> None:
    """Says that the last step is done: outside of other phases this thread is in ``end`` now."""
    own = _own()
    if own is not None:
        own.phase, own.detail, own.helpers = "end", "", None
        own.moves += 1


def _own() -> Activity | None:
    if threading.current_thread() is threading.main_thread():
        return activity
    return background.get(threading.get_ident())
