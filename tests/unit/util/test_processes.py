"""Work in other processes comes back in order, and a death is said."""

import os
import signal
import time

import pytest

from megatron.util.processes import Worker, mapping_processes


def slowest_first(number):
    time.sleep(0.2 if number == 0 else 0)
    return number, os.getpid()


def killed(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_order(processes):
    with mapping_processes(processes, "died") as each:
        numbers, ids = zip(*each(slowest_first, range(4)), strict=True)
    assert numbers == (0, 1, 2, 3)
    assert (set(ids) == {os.getpid()}) == (processes == 1)


def test_a_killed_process_is_said():
    with (
        pytest.raises(ChildProcessError, match="no memory"),
        mapping_processes(2, "no memory") as each,
    ):
        list(each(killed, range(4)))


def test_errors_come_as_they_are():
    with pytest.raises(TypeError), mapping_processes(2, "died") as each:
        list(each(slowest_first, [None], [1]))


def doubling():
    return double


def double(request):
    if request is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * request


def test_a_worker_answers_until_it_dies():
    worker = Worker(doubling)
    assert worker.ask(4) == 8
    with pytest.raises(TypeError):
        worker.ask({})
    with pytest.raises(ChildProcessError, match="a worker process died"):
        worker.ask(None)
    worker.stop()
