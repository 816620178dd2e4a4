"""How a contestant's process measures a round."""

import io
import json
import mmap
import os

import pytest
import torch
from contestants import worker
from contestants.worker import Clock, Rounds


class FakeEvent:
    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.now += 1500.0
        self.at = FakeEvent.now

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_round_on_a_gpu_is_timed_by_events_and_synchronised(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    clock = Clock()
    assert calls == ["reset", "synchronize"]
    found = clock.stop()
    assert calls == ["reset", "synchronize", "synchronize"]
    assert found["gpu_seconds"] == 1.5 and found["peak_bytes"] == 123


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux")
def test_peak_on_a_cpu_is_that_of_the_round():
    size = 400 * 2**20

    def touch():
        # Not of malloc's, which an earlier test may have told to keep what is freed.
        with mmap.mmap(-1, size) as memory:
            torch.frombuffer(memory, dtype=torch.uint8).fill_(1)

    touch()
    before = Clock().stop()["peak_bytes"]
    clock = Clock()
    touch()
    assert clock.stop()["peak_bytes"] > before + 0.9 * size
    clock = Clock()
    assert clock.stop()["peak_bytes"] < before + 0.5 * size


def test_cpu_seconds_are_the_processes_own():
    clock = Clock()
    x = torch.randn(300, 300)
    for _ in range(20):
        x @ x
    found = clock.stop()
    assert 0 < found["cpu_seconds"] <= found["wall_seconds"] * os.cpu_count() + 0.1


def test_warm_up_and_rounds(monkeypatch):
    """Warm-up is answered without times; each line that is read is one round; then it ends."""
    ended = []

    def end():
        ended.append(1)
        raise KeyboardInterrupt

    class Setting:
        warmup, steps = 3, 2

    monkeypatch.setattr(worker, "_end", end)
    monkeypatch.setattr("sys.stdin", io.StringIO("round\nround\n"))
    answers = io.StringIO()
    rounds = Rounds(Setting(), answers)
    done = 0
    with pytest.raises(KeyboardInterrupt):
        while True:
            done += 1
            rounds.after_step(torch.tensor(float(done)))
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert done == 7 and ended == [1]
    assert lines[0] == {"losses": [1.0, 2.0, 3.0]}
    assert [line["losses"] for line in lines[1:]] == [[4.0, 5.0], [6.0, 7.0]]
    assert all(line["wall_seconds"] > 0 for line in lines[1:])
