"""What a test run cost: processor time of all its processes, time on the clock, and the load of the
machine before it, which says how far the clock can be believed."""

from __future__ import annotations

import contextlib
import os
import time

import psutil
import pytest

_KEY = "cpu_seconds"


def cpu_seconds() -> float:
    """User and system time of this process and of all that it started; what they had started and
    waited for is in theirs."""
    process = psutil.Process()
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Cost:
    """A plugin that ends the run's report with a line on its cost."""

    def __init__(self) -> None:
        self.began, self.load = time.monotonic(), os.getloadavg()[0]
        self.of_workers = 0.0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """On a worker of xdist: hands its time to the process that reports."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_KEY] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """On the process that reports: a worker has ended."""
        self.of_workers += getattr(node, "workeroutput", {}).get(_KEY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the line."""
        total = self.of_workers + (sum(os.times()[:2]) if self.of_workers else cpu_seconds())
        seconds = time.monotonic() - self.began
        terminalreporter.write_line(
            f"{total:,.0f} s of CPU time in {seconds:,.0f} s; load before: {self.load:.2f}"
        )
