"""Phases of a start add up to its whole."""

import pytest
from tool_modules import load_program


@pytest.fixture(scope="module")
def startup():
    return load_program("benchmarks/startup.py")


def stamps_of(pid: int, late: float) -> list[dict]:
    phases = {"import torch": [2.0, 1.5], "step": [1.0, 0.5]}
    return [
        {"pid": pid, "start": [100.5, 0.25], "parent": 1},
        {"pid": pid, "step": [1.0, 0.5], "at": [105.0 + late, 3.0], "phases": phases},
        {"pid": pid, "step": [0.5, 0.4], "at": [106.0, 3.4], "phases": {}},
        {"pid": pid, "step": [0.7, 0.2], "at": [107.0, 3.6], "phases": {}},
    ]


def test_phases_are_means_of_wall_and_sums_of_cpu(startup):
    launcher = {"pid": 1, "start": [100.1, 0.05], "parent": 0}
    times = startup.times_of([launcher, *stamps_of(2, 0.0), *stamps_of(3, 1.0)], 100.0, 0.5)
    phases = times["phases"]
    assert phases["import torch"] == [2.0, 3.0]
    assert phases["first step"] == [1.0, 1.0]
    assert phases["launcher, interpreter"] == [0.5, 0.5 + 2 * 0.25]
    assert phases["other"] == pytest.approx([2.0, 2 * 0.75])
    assert times["total"] == pytest.approx([6.0, 6.5])
    assert sum(cpu for _, cpu in phases.values()) == pytest.approx(times["total"][1])
    assert times["later"] == pytest.approx([0.6, 0.6])
