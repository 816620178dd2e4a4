"""What this process does at the moment, for those who watch it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

PHASES = ("start", "data", "step", "evaluation", "save")
"""From the start of the program to the first step; waiting for a batch; computing a step; an
evaluation; a checkpoint, from its beginning to its end on this rank."""


@dataclass
class Activity:
    """Where the main thread is. ``moves`` grows with every change and every :func:`moved`: a
    process in which it does not is waiting, or computing something long."""

    phase: str = "start"
    detail: str = ""
    iteration: int = 0
    moves: int = 0


activity = Activity()
"""That of this process; read by other threads, written by the main one."""


@contextlib.contextmanager
def phase(name: str, detail: str = "") -> Iterator[None]:
    """Says that the process is in one of :data:`PHASES` until the block ends; ``detail`` is what it
    works on, such as a file or a data set."""
    before = activity.phase, activity.detail
    activity.phase, activity.detail = name, detail
    activity.moves += 1
    try:
        yield
    finally:
        activity.phase, activity.detail = before
        activity.moves += 1


def moved(iteration: int | None = None) -> None:
    """Says that the phase advances, such as by a micro batch; ``iteration`` is that of the step
    which is computed from now on."""
    if iteration is not None:
        activity.iteration = iteration
    activity.moves += 1
