"""Processes that hand over what they yield, and those that die instead."""

import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from megatron.apps.parity import ranks as module
from megatron.apps.parity.ranks import RankError, Ranks, environment, interrupts_held

JOBS = """
import os, signal, sys, time

def take_streams():
    "A fork has those with which pytest catches output."
    sys.stdout, sys.stderr = (open(file, "w", closefd=False) for file in (1, 2))

def raising():
    take_streams()
    yield os.getpid()
    if os.environ["RANK"] == "1":
        print("on standard output")
        raise ValueError("no more of this")
    time.sleep(0.2)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

def killed():
    take_streams()
    yield os.getpid()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    raise RuntimeError("Connection reset by peer")

def hanging(factor):
    yield int(os.environ["RANK"]) * factor
    yield os.environ["WORLD_SIZE"], os.environ["CUDA_VISIBLE_DEVICES"]
    yield os.getpid()
    time.sleep(600)
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    (tmp_path / "parity_jobs.py").write_text(JOBS)
    monkeypatch.syspath_prepend(tmp_path)
    import parity_jobs

    return parity_jobs


@pytest.fixture
def forked(monkeypatch):
    """Ranks start as forks; an interpreter that imports torch takes two seconds."""
    fork = multiprocessing.get_context("fork")
    forking = SimpleNamespace(
        get_context=lambda _: fork, parent_process=multiprocessing.parent_process
    )
    monkeypatch.setattr(module, "mp", forking)


def ended(process):
    """True if a process has ended; waits a while for it."""
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.usefixtures("forked")
def test_the_rank_that_raised_is_named(jobs):
    with Ranks(2, jobs.raising) as ranks:
        ranks.results()
        with pytest.raises(RankError) as error:
            ranks.results()
    first, *lines = str(error.value).splitlines()
    assert first == "rank 1 of 2 ended with exit status 1; its last lines:"
    assert lines[0].strip() == "on standard output"
    assert lines[-1].strip() == "ValueError: no more of this"


@pytest.mark.usefixtures("forked")
def test_a_killed_rank_is_named(jobs):
    with Ranks(2, jobs.killed) as ranks:
        ranks.results()
        with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
            ranks.results()


def test_results_come_as_they_are_yielded_and_leaving_ends_all(jobs):
    """By interpreters, as programs start them."""
    with Ranks(2, jobs.hanging, 3) as ranks:
        assert ranks.results() == [0, 3]
        assert ranks.results() == [("2", "")] * 2
        processes = ranks.results()
        assert os.kill(processes[0], 0) is None
        os.kill(processes[1], signal.SIGINT)  # the terminal sends it to all; the parent decides
        time.sleep(0.2)
        assert os.kill(processes[1], 0) is None
    assert all(map(ended, processes))


def test_a_process_is_started_whole_before_ctrl_c_ends_it():
    """Another thread may receive the signal; in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=time.sleep, args=(0.3,)).start()
    done = False
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            done = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert done


def test_environment_is_restored(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.delenv("RANK", raising=False)
    with environment({"WORLD_SIZE": "2", "RANK": "1"}):
        assert (os.environ["WORLD_SIZE"], os.environ["RANK"]) == ("2", "1")
    assert os.environ["WORLD_SIZE"] == "7" and "RANK" not in os.environ
