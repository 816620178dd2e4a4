"""Processes of a node share its cores."""

import os

import pytest
import torch

from megatron.engine.environment import own_cores
from megatron.util import processes

TWO_PROCESSORS = {core: (core % 4 // 2, core % 2) for core in range(8)}
"""Processor and core of each of 8 threads: 0 and 4, 1 and 5 ... are the two of one core."""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two processors with two cores of two threads each; lists what a process was bound to."""
    bound = [set(TWO_PROCESSORS)]
    for core, (processor, number) in TWO_PROCESSORS.items():
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{processor}\n")
        (folder / "core_id").write_text(f"{number}\n")
    real = processes.Path
    moved = str(tmp_path)
    monkeypatch.setattr(
        processes, "Path", lambda path: real(path.replace("/sys/devices/system/cpu", moved))
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, some: bound.append(set(some)))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)
    threads.clear()
    return bound


threads: list[int] = []
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def set_ranks(monkeypatch, rank, processes):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))


@pytest.mark.parametrize(
    ("processes", "shares"),
    [
        (2, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (3, [{0, 4}, {1, 5}, {2, 6}]),
    ],
)
def test_each_process_has_neighbouring_cores_of_its_own(monkeypatch, machine, processes, shares):
    for rank, share in enumerate(shares):
        set_ranks(monkeypatch, rank, processes)
        with own_cores(CPU):
            assert machine[-1] == share
        assert machine[-1] == set(TWO_PROCESSORS) and threads[-1] == len(share)


@pytest.mark.parametrize(
    ("device", "processes", "count"), [(CPU, 1, 8), (CPU, 16, 1), (GPU, 2, 4)], ids=str
)
def test_nothing_is_bound(monkeypatch, machine, device, processes, count):
    """Alone on the machine, with fewer cores than processes, and next to a GPU."""
    set_ranks(monkeypatch, 0, processes)
    with own_cores(device):
        assert len(machine) == 1 and threads == [count]


@pytest.mark.parametrize(
    ("cores", "count"), [({2, 3, 6}, 3), ({0, 1, 2, 3}, 4), ({0, 1, 2, 3, 4, 5}, 3)], ids=str
)
def test_what_others_have_bound_stays(monkeypatch, machine, cores, count):
    """Up to half of 8 are this process's own, of two; more are those of both."""
    set_ranks(monkeypatch, 1, 2)
    machine[-1] = cores
    with own_cores(CPU):
        assert machine == [cores] and threads == [count]


def test_the_user_can_leave_processes_free_to_move(monkeypatch, machine):
    set_ranks(monkeypatch, 1, 2)
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    with own_cores(CPU):
        assert len(machine) == 1 and threads == [4]


def test_threads_that_the_user_has_set_stay(monkeypatch, machine):
    set_ranks(monkeypatch, 1, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with own_cores(CPU):
        assert len(machine[-1]) == 4 and not threads


def test_macos_has_no_binding(monkeypatch, machine):
    monkeypatch.delattr(os, "sched_getaffinity")
    set_ranks(monkeypatch, 0, 2)
    with own_cores(CPU):
        assert len(machine) == 1 and threads == [4]
