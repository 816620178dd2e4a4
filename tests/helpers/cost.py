"""What a test run cost: processor time of all its processes, time on the clock, and the load of the
machine before it, which says how far the clock can be believed."""

from __future__ import annotations

import contextlib
import os
import time

import psutil
import pytest


def cpu_seconds() -> float:
    """User and system time of this process and of all that it started; what they had started and
    waited for is in theirs."""
    total = sum(os.times()[:4])
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Cost:
    """A plugin that ends the run's report with a line on its cost."""

    def __init__(self) -> None:
        self.began, self.load = time.monotonic(), os.getloadavg()[0]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the line."""
        seconds = time.monotonic() - self.began
        terminalreporter.write_line(
            f"{cpu_seconds():,.0f} s of CPU time in {seconds:,.0f} s; load before: {self.load:.2f}"
        )
