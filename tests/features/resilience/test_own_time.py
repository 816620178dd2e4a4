"""What counts as the own time of a rank."""

from __future__ import annotations

import ctypes
import time
import weakref
from types import SimpleNamespace

import pytest

from megatron.features.resilience.steps import stragglers as own_time
from megatron.features.resilience.steps.stragglers import OwnTime, OwnTimeMeter
from megatron.util.phases import phase

# A function as in the package in which ranks wait for each other.
_NAMES: dict[str, object] = {}
exec(
    compile("import time\ndef meet(s): time.sleep(s)", "/x/torch/distributed/c10d.py", "exec"),
    _NAMES,
)
meet = _NAMES["meet"]


def measured(work) -> OwnTime:
    meter = OwnTimeMeter(period=0.01)
    meter.resume()
    work()
    meter.pause()
    meter.close()
    return meter.take()


def test_waiting_for_other_ranks_is_not_a_ranks_own_time():
    """Where the thread that looks has no processor, that counts."""
    alone, together = (measured(lambda work=work: work(0.4)) for work in (time.sleep, meet))
    assert alone.own - alone.unscheduled > 0.2
    assert together.own - together.unscheduled < 0.1


def test_the_interpreters_lock_is_held():
    def work():
        for _ in range(2):
            ctypes.PyDLL(None).usleep(200_000)
            time.sleep(0.05)  # a step that ends with the lock held has ended before the next look

    actual = measured(work)
    assert actual.own > 0.2
    assert actual.unscheduled > 0.2


def measured_with_delays(monkeypatch, waits: bool, late, lacked) -> OwnTime:
    """A minute in which the main thread waits for other ranks, or does not. The thread that looks
    wakes up late by ``late`` of the time; for the share ``lacked`` of that it has no processor."""
    meter, now, delay = OwnTimeMeter(), 0.0, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now, delay
        by = late(now + seconds)
        now, delay = now + seconds + by, delay + lacked * by
        meter._closed = now > 60

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(own_time, "time", clock)
    monkeypatch.setattr(own_time, "_waits", lambda: waits)
    monkeypatch.setattr(own_time, "_run_delay", lambda task="self": delay / 2)
    meter._counting = True
    meter._look()
    return meter.take()


@pytest.mark.parametrize("waits", [False, True])
def test_a_process_that_is_mostly_stopped(monkeypatch, waits):
    """In pauses that are shorter than the interval between looks."""
    actual = measured_with_delays(monkeypatch, waits, lambda at: max(0.0, 0.2 - at % 0.23), 0)
    assert actual.suspended == actual.unscheduled == pytest.approx(0.2 / 0.23 * 60, rel=0.15)
    assert actual.own == pytest.approx(actual.unscheduled if waits else 60, rel=0.02)


def test_only_the_thread_that_looks_lacks_a_processor(monkeypatch):
    actual = measured_with_delays(monkeypatch, True, lambda at: 0.04, 1)
    assert actual.own == actual.unscheduled == pytest.approx(0.02 / 0.34 * 60, rel=0.1)
    assert actual.suspended == 0


def test_waiting_for_data():
    def work():
        with phase("data"):
            time.sleep(0.3)

    actual = measured(work)
    # Without a processor for the thread that looks, the time is known, but not what it was for.
    assert actual.reading > 0
    assert actual.reading + actual.unscheduled > 0.1


def test_pauses_do_not_count():
    meter, began = OwnTimeMeter(period=0.01), time.monotonic()
    meter.resume()
    meter.pause()
    between = time.monotonic() - began  # longer than nothing where others have the processor
    time.sleep(0.2)
    assert meter.take().own < between + 0.1
    meter.close()


def test_what_is_taken_counts_once():
    meter = OwnTimeMeter(period=0.01)
    meter.resume()
    time.sleep(0.1)
    assert meter.take().own > 0
    meter.close()
    meter.take()
    assert meter.take() == OwnTime()


def test_it_keeps_nothing_of_calls_that_have_returned():
    class Thing:
        pass

    def call():
        thing = Thing()
        time.sleep(0.5)  # in which the thread looks at this frame
        return weakref.ref(thing)

    meter = OwnTimeMeter(period=0.2)
    meter.resume()
    try:
        assert call()() is None
    finally:
        meter.close()


def test_an_error_of_the_thread_is_reported(monkeypatch, capfd):
    def fail() -> bool:
        raise TypeError("unhashable type: 'dict'")

    monkeypatch.setattr(own_time, "_waits", fail)
    meter = OwnTimeMeter(period=0.01)
    meter.resume()
    assert meter._thread is not None
    meter._thread.join(30)
    printed = capfd.readouterr().err
    assert printed.startswith("WARNING: the own time thread of process ")
    assert "ended by TypeError: unhashable type: 'dict'; this rank can no longer" in printed
    assert printed.count("\n") == 1
