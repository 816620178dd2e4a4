"""Run tests on processes that are forked from the one that has collected them.

    python -m pytest --workers 3

A process takes the tests of a file, or a piece of a long one, whenever it has none left, the
longest first. Modules are imported, and tests collected, once for all of them. A process that dies
fails the test that it was running, and another takes over what it had still to run.
"""

from __future__ import annotations

import mmap
import os
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
import stem
from _pytest.runner import runtestprotocol
from forked_workers import ForkedWorker
from parts import recorded, split

from megatron.util import workers

_RECORD = 4
"""Bytes of the number of a piece."""


@dataclass
class _Worker:
    """A process that runs tests, seen from the one that reports.

    Attributes:
        pid: its process id.
        pipe: what it sends.
        remaining: tests that it has taken and not finished; the first one is running.
        error: the traceback of what has ended it.
    """

    pid: int
    pipe: Connection
    remaining: deque[pytest.Item]
    error: str = ""


class Forks:
    """A plugin that runs the collected tests on several processes.

    Args:
        count: number of processes.
        in_order: pieces keep the order of their first tests.
    """

    def __init__(self, count: int, in_order: bool) -> None:
        self._count, self._in_order = count, in_order
        self._pieces: list[list[pytest.Item]] = []
        self._workers: list[_Worker] = []
        self._stop = mmap.mmap(-1, 1)  # shared with the processes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run everything and report it, unless pytest's own loop would run nothing."""
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None
        self._pieces = self._cut(session.items)
        self._queue, writing = os.pipe()
        for number in range(len(self._pieces)):
            os.write(writing, number.to_bytes(_RECORD, "little"))
        os.close(writing)
        stem.shared()
        try:
            for _ in range(min(self._count, len(self._pieces))):
                self._start(session, deque())
            while self._workers:
                self._listen(session)
        finally:
            self._stop[0] = 1
            for worker in self._workers:
                os.waitpid(worker.pid, 0)
            stem.shared().stop()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _cut(self, items: list[pytest.Item]) -> list[list[pytest.Item]]:
        by_name = {item.nodeid: item for item in items}
        (pieces,) = split(list(by_name), 1, recorded())
        if self._in_order:
            position = {name: number for number, name in enumerate(by_name)}
            pieces.sort(key=lambda piece: position[piece.tests[0]])
        return [[by_name[name] for name in piece.tests] for piece in pieces]

    def _start(self, session: pytest.Session, tests: deque[pytest.Item]) -> None:
        """Start a process, which first runs ``tests``."""
        pipe, far_end = Pipe(duplex=False)
        # Not by multiprocessing, for which tests would then not run in a main process.
        if (pid := os.fork()) == 0:
            self._run(session, far_end, list(tests))
        far_end.close()
        self._workers.append(_Worker(pid, pipe, tests))

    def _listen(self, session: pytest.Session) -> None:
        ready = wait([worker.pipe for worker in self._workers], timeout=1.0)
        for worker in list(self._workers):
            if worker.pipe in ready:
                try:
                    self._take(session, worker, *worker.pipe.recv())
                except (EOFError, OSError):
                    self._end(session, worker)
            # A process that a test has left behind keeps the pipe of one that has ended open.
            elif _has_ended(worker.pid) and not worker.pipe.poll():
                self._end(session, worker)
        if session.shouldfail or session.shouldstop:
            self._stop[0] = 1

    def _take(self, session: pytest.Session, worker: _Worker, kind: str, content: Any) -> None:
        hook = session.config.hook
        if kind == "piece":
            worker.remaining += self._pieces[content]
        elif kind == "test":
            for data in content:
                report = hook.pytest_report_from_serializable(config=session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
            worker.remaining.popleft()
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        elif kind == "error":
            worker.error = f"\n{content}"
        else:
            session.shouldstop = content

    def _end(self, session: pytest.Session, worker: _Worker) -> None:
        """Report the test in which a process has died, and start another for those after it."""
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        worker.pipe.close()
        self._workers.remove(worker)
        if self._stop[0] or not worker.remaining:
            return
        item = worker.remaining.popleft()
        message = f"its process ended with exit code {status}{worker.error}"
        report = pytest.TestReport(
            item.nodeid, item.location, {}, outcome="failed", longrepr=message, when="call"
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        self._start(session, worker.remaining)

    def _run(self, session: pytest.Session, pipe: Connection, tests: list[pytest.Item]) -> NoReturn:
        """The forked process: never comes back."""
        status = 1
        try:
            self._work(session, pipe, tests)
            status = 0
        except BaseException:  # an exit too must reach the process that reports
            pipe.send(("error", traceback.format_exc()))
        finally:
            os._exit(status)

    def _work(self, session: pytest.Session, pipe: Connection, tests: list[pytest.Item]) -> None:
        """Run tests until no piece is left."""
        config = session.config
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # into files that are shared with the other processes
        capture.start_global_capturing()
        self._folder = config._tmp_path_factory.getbasetemp() / f"worker-{os.getpid()}"
        self._folder.mkdir(mode=0o700)
        config.pluginmanager.register(_Sender(pipe))
        setattr(workers, "Worker", ForkedWorker)  # noqa: B010
        following = self._tests(config, pipe, tests)
        item = next(following, None)
        while item is not None and not self._stop[0]:
            after = next(following, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldstop:
                pipe.send(("stop", session.shouldstop))
                break
            item = after
        session._setupstate.teardown_exact(None)

    def _tests(
        self, config: pytest.Config, pipe: Connection, first: list[pytest.Item]
    ) -> Iterator[pytest.Item]:
        self._enter(config, "first")
        yield from first
        while number := os.read(self._queue, _RECORD):
            piece = int.from_bytes(number, "little")
            pipe.send(("piece", piece))
            self._enter(config, str(piece))
            yield from self._pieces[piece]

    def _enter(self, config: pytest.Config, name: str) -> None:
        """Have temporary folders made in a folder of their own: each new one is numbered by going
        through those that are there."""
        config._tmp_path_factory._basetemp = self._folder / name
        config._tmp_path_factory._basetemp.mkdir(mode=0o700)


def _has_ended(pid: int) -> bool:
    """True if a process of this one has ended; its status is kept."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Sender:
    """A plugin that runs a test and sends its reports: of its call alone, with the time of all its
    phases, where the others pass."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        config = item.config
        reports, sent = runtestprotocol(item, log=False, nextitem=nextitem), []
        for report in reports:
            if report.when == "call":
                report.duration = sum(each.duration for each in reports)
            if report.when == "call" or not report.passed:
                sent.append(config.hook.pytest_report_to_serializable(config=config, report=report))
        self._pipe.send(("test", sent))
        return True

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        content = {"warning_message": warning_message, "when": when, "nodeid": nodeid}
        with suppress(Exception):  # a warning that cannot be pickled is not in the summary
            self._pipe.send(("warning", content | {"location": location}))
