"""When a watchdog ends a run: by ticks in which nothing advances, never by the clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config import ConfigError
from megatron.features.resilience.watch import watchdog
from megatron.features.resilience.watch.processes import GONE, awaited_file, state_of
from megatron.features.resilience.watch.watchdog import Idleness, Watchdog, hang_limits
from megatron.util.phases import PHASES, Activity, activity, background, moved, phase


def config(seconds: float | None, *limits: str, minutes: float = 30) -> Any:
    return SimpleNamespace(
        section=lambda cls: cls(hang_seconds=seconds, hang_limits=limits),
        parallel=SimpleNamespace(distributed_timeout_minutes=minutes),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (config(None), {"step": 1620, "data": 1620, "start": 3600}),
        (config(None, minutes=120), {"step": 6480, "start": 6480}),
        (config(60), {"save": 60, "evaluation": 60, "start": 3600}),
        (config(60, "start=5", "save=900.4"), {"start": 5, "save": 901, "step": 60}),
        (config(0), dict.fromkeys(PHASES, 0)),
        (config(0, "data=10"), {"data": 10, "step": 0}),
    ],
)
def test_limits_of_the_phases(given: Any, expected: dict[str, int]) -> None:
    found = hang_limits(given)
    assert {name: found[name] for name in expected} == expected and tuple(found) == PHASES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("load=5", "--hang-limits load=5: expected PHASE=SECONDS with one of start, data"),
        ("step", "--hang-limits step: expected PHASE=SECONDS"),
        ("step=", "--hang-limits step=: '' is not a number of seconds"),
        ("step=soon", "'soon' is not a number of seconds"),
        ("step=-1", "'-1' is not a number of seconds"),
        ("step=inf", "'inf' is not a number of seconds"),
        ("step=nan", "'nan' is not a number of seconds"),
    ],
)
def test_limits_that_make_no_sense_are_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hang_limits(config(60, given))


def test_what_advances_is_not_idle() -> None:
    watched = Activity()
    idle = Idleness(watched)
    for _ in range(5):
        idle.count()
    assert (idle.ticks, idle.longest) == (5, 0)
    watched.moves += 1
    idle.count()
    assert (idle.ticks, idle.longest) == (0, 5), "the longest wait after which it advanced"
    watched.moves += 1
    idle.count()
    assert idle.longest == 4, "is forgotten by and by"


def test_a_save_that_waits_for_the_one_in_the_background_advances_with_it() -> None:
    watched, behind = Activity("save"), Activity("save")
    idle = Idleness(watched)
    background[-1] = behind
    try:
        for _ in range(3):
            behind.moves += 1
            idle.count()
        assert idle.ticks == 0
        idle.count()
        assert idle.ticks == 1
    finally:
        del background[-1]


class WatchedProcess:
    """A watchdog of this process, which has no other ranks; every tick is one of the test's."""

    def __init__(self, limit: int) -> None:
        self.ended: list[int] = []
        self.dog = Watchdog(dict.fromkeys(PHASES, limit), end=self.ended.append)

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.ended:
                self.dog._count()
                self.dog._act()

    def signal(self, number: int) -> None:
        self.dog._hear(bytes([number]))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # The thread of a test is not always the main one.
    for name, value in vars(Activity()).items():
        monkeypatch.setattr(activity, name, value)
    with phase("step"):
        yield


@pytest.mark.usefixtures("alone")
def test_a_run_ends_once_nothing_has_advanced_for_its_limit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    watched = WatchedProcess(limit=5)
    watched.tick()
    activity.moves += 1
    watched.tick(5)
    assert not watched.ended
    watched.tick()
    assert watched.ended == [3]
    printed = capfd.readouterr().err
    assert printed.startswith("error: rank 0 (") and "has not advanced for 5 s" in printed
    assert "there is no checkpoint" in printed and "test_watchdog.py" in printed


@pytest.mark.usefixtures("alone")
def test_a_run_ends_although_its_report_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(watchdog, "write_report", fail)
    watched = WatchedProcess(limit=2)
    with pytest.raises(RuntimeError, match="new thread"):
        watched.tick(10)
    assert watched.ended == [3]


@pytest.mark.usefixtures("alone")
def test_a_suspended_process_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever clocks say when it is continued."""
    watched = WatchedProcess(limit=5)
    for number in range(4):
        for clock in ("time", "monotonic"):
            monkeypatch.setattr(time, clock, lambda n=number: 1e6 * (n + 1))
        watched.tick()
    assert not watched.ended


@pytest.mark.usefixtures("alone")
def test_a_signal_that_no_step_obeys_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    watched = WatchedProcess(limit=600)
    watched.tick(2)
    watched.signal(signal.SIGTERM)
    watched.tick(9)
    assert not watched.ended, "a step may still end"
    watched.tick(2)
    assert watched.ended == [3]
    assert "error: SIGTERM cannot be obeyed: rank 0 (" in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_slow_steps_have_longer_after_a_signal() -> None:
    watched = WatchedProcess(limit=600)
    watched.tick(30)
    activity.moves += 1
    watched.tick()
    watched.signal(signal.SIGUSR1)
    watched.tick(44)
    assert not watched.ended
    watched.tick(2)
    assert watched.ended == [3]


@pytest.mark.usefixtures("alone")
def test_a_run_without_limits_is_let_be() -> None:
    watched = WatchedProcess(limit=0)
    watched.tick(10_000)
    assert not watched.ended


def test_phases_of_other_threads_are_not_the_main_one() -> None:
    seen = []

    def save() -> None:
        with phase("save", "folder"):
            moved()
            seen.extend(found.phase for found in background.values())

    before = activity.moves
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert seen == ["save"] and not background and activity.moves == before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_the_system_says_of_a_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert state_of(process.pid) != GONE
            process.send_signal(signal.SIGSTOP)
            soon(lambda: "is stopped (state T" in state_of(process.pid))
        finally:
            process.kill()
        soon(lambda: state_of(process.pid) == GONE)
    assert state_of(process.pid) == GONE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_file_that_a_thread_waits_for(tmp_path: Path) -> None:
    """A pipe with a name, which nobody writes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    idents: list[int] = []

    def read() -> None:
        idents.append(threading.get_native_id())
        with open(pipe, "rb") as file:
            file.read(1)

    thread = threading.Thread(target=read)
    thread.start()
    soon(lambda: bool(idents) and awaited_file(os.getpid(), idents[0]) == f"open of {pipe}")
    with open(pipe, "wb") as file:
        soon(lambda: awaited_file(os.getpid(), idents[0]) == f"read of {pipe}")
        file.write(b"0")
    thread.join()


def soon(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
