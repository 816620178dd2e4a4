"""What a fault is, and what is true after it: found in time, the right one named, nothing lost.

A fault is tried on a real training of a tiny model. It happens; some rank must name it within
``limit`` seconds and ten more; the run ends with a status that says whether a restart helps, or
continues; started again it begins at the newest checkpoint or after it, and ends with the weights
of a training without the fault, bit by bit.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from faults.training import DP2, PATIENCE, STEPS, Layout, Training, Undisturbed, weights
from warm_runs import WarmRuns

GRACE = 10.0
"""Seconds after its limit in which a fault is named."""
NAMED = re.compile(
    r"rank (\d+) \([^()]*\)(?:, which has the store of the ranks,)?"
    r"(?= (?:does not answer|has not advanced|has ended))"
)
"""A rank that the line of a watchdog blames."""


class Place(NamedTuple):
    """Where a training runs.

    Attributes:
        save: the folder of checkpoints, if it is not the usual one.
        of: settings of :mod:`faults.program` for each rank.
        variables: of the environment of each rank.
        tools: what the fault works with, such as a mount or a network.
    """

    save: Path | None = None
    of: Callable[[int], Mapping[str, Any]] = lambda rank: {}
    variables: Callable[[int], Mapping[str, object]] = lambda rank: {}
    tools: Any = None


@contextlib.contextmanager
def usual(folder: Path) -> Iterator[Place]:
    yield Place()


@dataclass(frozen=True)
class Fault:
    """A fault and what is expected.

    Attributes:
        name: of the fault.
        title: how it is injected, in words of the table.
        says: what some rank prints, a regular expression.
        inject: makes it happen; it gets the training and the tools of its place.
        inside: rank, place, iteration and what happens, of a fault inside of a rank, in place of
            ``inject``.
        shape: the layout.
        flags: further ones of the training.
        at: the iteration after which it is injected.
        limit: seconds after which it must be found at the latest.
        culprits: ranks that the message must name, and no others; None where it names none.
        statuses: how the ranks that were not the fault's victims may end; empty if the training
            continues to its end.
        victims: ranks whose exit status does not count.
        mend: undoes the fault before the training is started again.
        mended_first: whether the ranks can end only then, as those that the system keeps waiting.
        same: whether it ends with the weights of a training without the fault.
        place: where the training runs.
        lost: most steps that may be lost, by default those since the newest checkpoint.
    """

    name: str
    title: str
    says: str
    inject: Callable[[Training, Any], object] | None = None
    inside: tuple[str, int, int, str] | None = None
    shape: Layout = DP2
    flags: tuple[str, ...] = ("--save-interval", "5")
    at: int = 7
    limit: float = 0.0
    culprits: frozenset[int] | None = None
    statuses: frozenset[int] = frozenset((3,))
    victims: frozenset[int] = frozenset()
    mend: Callable[[Training, Any], object] = lambda training, tools: None
    mended_first: bool = False
    same: bool = True
    place: Callable[[Path], AbstractContextManager[Place]] = usual
    earlier: bool = False
    """Whether the training runs once before, to step ``at``, so that there is a checkpoint."""
    data: tuple[str, ...] = field(default=())
    """Flags that change what is computed, which the undisturbed training has, too."""


@dataclass(frozen=True)
class Outcome:
    """What happened: ``seconds`` until the message, the message, and what is wrong."""

    fault: Fault
    seconds: float | None
    message: str
    lost: int
    wrong: tuple[str, ...]

    def row(self) -> str:
        """A row of the table."""
        found = "not" if self.seconds is None else f"{self.seconds:.1f} s"
        message = self.message.replace("|", "\\|")[:230]
        lost = f"{self.lost} steps" if self.lost else "nothing"
        return (
            f"| {self.fault.title} | {self.fault.shape.name} | {found} | {message} | {lost} | "
            f"`tests/faults/test_faults.py::test_fault` ({self.fault.name}) |"
        )


def attempt(fault: Fault, warm: WarmRuns, folder: Path, undisturbed: Undisturbed) -> Outcome:
    """Tries a fault in an empty folder."""
    with fault.place(folder) as place:
        inside = {} if fault.inside is None else {"fault": list(fault.inside)}
        training = Training(
            warm,
            folder,
            fault.shape,
            [*fault.flags, *fault.data],
            lambda rank: {**place.of(rank), **inside},
            place.save,
            place.variables,
        )
        try:
            return _attempt(fault, training, place, undisturbed)
        finally:
            fault.mend(training, place.tools)
            training.end()


def _attempt(fault: Fault, training: Training, place: Place, undisturbed: Undisturbed) -> Outcome:
    wrong = list[str]()
    if fault.earlier:
        training.flags += ["--exit-interval", "10"]
        training.finish()
        del training.flags[-2:]
    training.start()
    if fault.inside is not None:
        training.until(training.begun, "fault")
        begin = time.monotonic()
    else:
        training.reach(fault.at)
        begin = time.monotonic()
        assert fault.inject is not None
        fault.inject(training, place.tools)
    expected = re.compile(fault.says)
    with contextlib.suppress(AssertionError):  # it is silent
        training.until(lambda: expected.search(training.texts()), "", fault.limit + 3 * GRACE)
    found = expected.search(training.texts())
    seconds = time.monotonic() - begin if found else None
    message = _line_of(training.texts(), found) if found else ""
    if seconds is None:
        wrong.append(f"silent: nothing like {fault.says!r} in\n{training.texts()[-1000:]}")
    elif seconds > fault.limit + GRACE:
        wrong.append(f"late: {seconds:.1f} s, the limit is {fault.limit:g} s")
    reached = training.iteration
    if fault.mended_first:
        fault.mend(training, place.tools)
    wrong += _ended(fault, training)
    wrong += _blamed(fault, training)
    saved = max(training.saved, default=10 if fault.earlier else 0)
    training.end()
    fault.mend(training, place.tools)
    if training.statuses != [0] * fault.shape.size or reached < STEPS:
        training.finish()
        if training.resumed < saved:
            wrong.append(f"step {saved} was saved, and it began again at {training.resumed}")
    lost = max(0, reached - training.resumed) if training.starts > 1 + fault.earlier else 0
    if fault.same and weights(training.save) != undisturbed.weights(fault.shape, fault.data):
        wrong.append("the weights are not those of a training without the fault")
    return Outcome(fault, seconds, message, lost, tuple(wrong))


def _ended(fault: Fault, training: Training) -> Iterator[str]:
    """What is wrong with how the ranks end."""
    healthy = [rank for rank in range(fault.shape.size) if rank not in fault.victims]
    seconds = PATIENCE if not fault.statuses else 40.0
    with contextlib.suppress(AssertionError):
        training.until(
            lambda: all(training.status(rank) is not None for rank in healthy), "end", seconds
        )
    for rank in healthy:
        status, expected = training.status(rank), fault.statuses or {0}
        if status not in expected:
            how = "still runs" if status is None else f"ended with {status}"
            wanted = " or ".join(map(str, sorted(expected)))
            yield f"rank {rank} {how}, expected {wanted}:\n{training.text(rank)[-1000:]}"


def _blamed(fault: Fault, training: Training) -> Iterator[str]:
    """Whether the right ranks are named, and no others."""
    lines = [line for line in training.texts().splitlines() if NAMED.search(line)]
    named = {int(rank) for line in lines for rank in NAMED.findall(line)}
    if fault.culprits is not None and named != fault.culprits:
        yield f"blames {sorted(named)}, the fault is of {sorted(fault.culprits)}: {lines[:4]}"


def _line_of(text: str, found: re.Match[str]) -> str:
    begin = text.rfind("\n", 0, found.start()) + 1
    return text[begin:].partition("\n")[0].strip()
