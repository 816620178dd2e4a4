"""When the ranks exchange their times, and when they read them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.steps import stragglers
from megatron.parallel.mesh import Group, Mesh
from megatron.training.stopping import DelayedReads

TWO_RANKS = Mesh(Group((0, 1)), {"data": 2})


class Course:
    """Steps of 0.3 s, and the iterations after which the ranks send their times and read them."""

    def __init__(self, monkeypatch, lag: int) -> None:
        self.now, self.iteration = 0.0, 0
        self.sent: list[int] = []
        self.read: list[int] = []
        monkeypatch.setattr(
            stragglers, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=time.sleep)
        )
        monkeypatch.setattr(stragglers.dist, "all_reduce", self.all_reduce)
        self.report = SimpleNamespace(at_line=[])
        options = ResilienceConfig(), TWO_RANKS, torch.device("cpu"), self.report
        self.look = stragglers.Stragglers(*options)
        self.look._reads = DelayedReads(lag)
        monkeypatch.setattr(self.look._rule, "add", self.add)

    def all_reduce(self, rows: torch.Tensor) -> None:
        self.sent.append(self.iteration)

    def add(self, steps: int, pieces: object) -> list[object]:
        self.read.append(self.iteration)
        return []

    def step(self) -> None:
        self.look.before_step(self)
        self.now += 0.3
        self.iteration += 1
        with self.look.paused(self):
            pass


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_times_of_ranks_are_read_after_the_lag(monkeypatch, lag):
    """Every two seconds or so: seven steps after the last ones were read."""
    course = Course(monkeypatch, lag)
    with course.look:
        for _ in range(2000):
            course.step()
    assert course.sent == list(range(2, 2001, 7 + lag))
    assert course.read == [at + lag for at in course.sent if at + lag <= 2000]
    assert course.report.at_line[0](0.0)["slowest_rank"] == 0


def test_two_looks_are_no_measurement(monkeypatch):
    course = Course(monkeypatch, 0)
    with course.look:
        for _ in range(4):
            course.step()
        assert course.read == [2] and course.report.at_line[0](0.0) == {}
        for _ in range(20):
            course.step()
        assert "slowest_rank" in course.report.at_line[0](0.0)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_times_of_ranks_are_read_again_after_going_back(monkeypatch, lag):
    """Those that were sent before it are not read."""
    course = Course(monkeypatch, lag)
    with course.look:
        for _ in range(3):
            course.step()
        course.iteration = 0
        course.look.went_back(course)
        for _ in range(25):
            course.step()
    assert course.sent == [2, *range(1, 23, 7 + lag)]
    assert course.read == [2] * (lag == 0) + [at + lag for at in course.sent[1:]]
