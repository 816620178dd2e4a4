"""Spends the time: the best cell that fits into what is left, one after another."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpu_suite.ladder import (
    CEILINGS,
    SLACK,
    TESTS,
    Cell,
    needs_own_process,
    selection,
    start_seconds,
)
from gpu_suite.processes import OutOfTime, Sampler, Worker, WorkerDied, gpu_tests
from gpu_suite.results import Found, Results, failure, finished
from gpu_suite.worker import request_of

CUT_OFF_TWICE = 2
ALIKE = ("group", "shape", "seq_length", "trace")
"""Properties shared by cells that take about as long as one another."""
MARGIN = 1.2
LEAST = 60.0
"""Seconds that every cell may take at least."""
START_TIMEOUT = 300.0
LEFT_SHARE = 0.02
"""Share of the device's memory that a cell may leave behind before its worker is replaced."""


def next_cell(
    cells: Sequence[Cell], results: Results, peak_flops: float, left: float
) -> tuple[Cell, float] | None:
    """The first cell without a result that fits into the time left, in seconds, and its estimated
    duration; those that were cut off twice come last."""
    known = {name: found for name, found in results.all().items() if finished(found)}
    open_cells = [cell for cell in cells if cell.name not in known]
    open_cells.sort(key=lambda cell: len(results.begun.get(cell.name, ())) >= CUT_OFF_TWICE)
    for cell in open_cells:
        seconds = needed(cell, known.values(), results.begun.get(cell.name, ()), peak_flops)
        if seconds <= left:
            return cell, seconds
    return None


def needed(cell: Cell, known: Iterable[Found], given: Sequence[float], peak_flops: float) -> float:
    """Estimated seconds of a cell.

    Args:
        known: what was measured; if several cells of its group, shape and length that start as
            fast were, it takes as long as the slowest of them.
        given: seconds that it was given before, and were not enough.
        peak_flops: the device's rate by its data sheet.
    """
    like = [
        found["seconds"]
        for found in known
        if cell.shape
        and failure(found) is None
        and start_seconds(found["cell"]["contestant"]) == start_seconds(cell.contestant)
        and all(found["cell"][each] == getattr(cell, each) for each in ALIKE)
    ]
    seconds = MARGIN * max(like) if len(like) >= 2 else cell.seconds(peak_flops)
    return max([seconds, *(MARGIN * each for each in given)])


class Suite:
    """A run of the suite.

    Args:
        results: where what is found is kept.
        say: receives progress messages.
        after_each: called when a cell begins and when it ends.
        limit: seconds for all of it; None for no limit.
    """

    def __init__(
        self,
        results: Results,
        say: Callable[[str], None],
        after_each: Callable[[], None],
        limit: float | None = None,
    ) -> None:
        self.results, self.say, self.after_each = results, say, after_each
        self.deadline = None if limit is None else time.monotonic() + limit
        self.worker: Worker | None = None
        self.machine: Found = {}
        self.too_slow: set[str] = set()  # they come after what was not tried yet

    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def run(self, cells: Sequence[Cell]) -> bool:
        """Measures what has not been measured and fits; whether nothing is open.

        Raises:
            ValueError: the folder has results of another device.
            WorkerDied, OutOfTime: no worker starts on this machine.
        """
        try:
            self._start()
            peak = self.machine["peak_flops"]
            while chosen := next_cell(self._in_order(cells), self.results, peak, self.left()):
                self._measure(*chosen)
        finally:
            self._stop()
        open_cells = [cell.name for cell in cells if not finished(self.results.of(cell.name))]
        if open_cells:
            self.say(f"left to the next run: {', '.join(open_cells)}")
        return not open_cells

    def _in_order(self, cells: Sequence[Cell]) -> list[Cell]:
        return sorted(cells, key=lambda cell: cell.name in self.too_slow)

    def _start(self) -> Worker:
        if self.worker is None:
            log, cache = self.results.folder / "worker.log", self.results.folder / "cache"
            self.worker = Worker(log, cache, min(START_TIMEOUT, self.left()))
            self.machine = self.worker.machine
            known, here = self.results.device(), self.machine["device"]
            if known not in (None, here):
                raise ValueError(
                    f"--results {self.results.folder} has results of {known}, this is {here}; give "
                    "another folder and bundle"
                )
        return self.worker

    def _stop(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _measure(self, cell: Cell, estimate: float) -> None:
        allowed = max(SLACK * estimate, LEAST)
        timeout = min(allowed, self.left())
        self.say(f"{cell.name}: about {estimate:.0f} s")
        self.results.begin(cell.name)
        self.after_each()
        began = time.monotonic()
        try:
            with Sampler() as sampler:
                found = self._found(cell, timeout)
        except OutOfTime as error:
            self.worker = None
            found = error.found | {"failed": f"not done within {timeout:.0f} s"}
            limited = timeout < allowed
            if limited or len(self.results.begun[cell.name]) < CUT_OFF_TWICE:
                by = " by the time limit" if limited else ""
                self.say(f"{cell.name}: cut off after {timeout:.0f} s{by}")
                self.too_slow.add(cell.name)
                self.results.cut_off(cell.name, timeout)
                found["unfinished"] = True
                if not error.found:
                    self.after_each()
                    return
        except WorkerDied as error:
            self.worker = None
            found = {"failed": str(error)}
        found |= {
            "cell": dataclasses.asdict(cell),
            "machine": self.machine,
            "gpu": sampler.found,
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "seconds": time.monotonic() - began,
        }
        self.results.put(cell.name, found)
        self.after_each()

    def _found(self, cell: Cell, timeout: float) -> Found:
        if cell.group == TESTS:
            self._stop()  # its memory is theirs
            return gpu_tests(selection(cell), self.results.folder / "tests.log", timeout)
        alone = needs_own_process(cell)
        if alone:
            self._stop()
        deadline = time.monotonic() + timeout
        worker = self._start()
        request = request_of(cell, self.results.trace(cell.name), self._about())
        found = worker.ask(request, max(0.0, deadline - time.monotonic()))
        found["log"] = worker.said()
        left, memory = found.get("left_bytes", 0), self.machine.get("memory_bytes")
        if alone or found.pop("restart", False) or (memory and left > LEFT_SHARE * memory):
            self._stop()
        return found

    def _about(self) -> dict[str, Any]:
        """Description of the device for the table of a trace."""
        ceilings = self.results.of(CEILINGS) or {}
        peak = ceilings.get("square", {}).get("bf16") or self.machine["peak_flops"]
        return {"matmul_peak_flops": peak}
