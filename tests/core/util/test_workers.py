"""Work in other processes comes back in order, and a death is said."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron.util import workers
from megatron.util.workers import Worker, map_in_order

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_interpreters(monkeypatch):
    """The workers of all other tests may be forks."""
    monkeypatch.setattr(workers, "Worker", Worker)


def slowest_first(number):
    time.sleep(0.2 if number == 0 else 0)
    return number, os.getpid()


def doubling():
    return double


class PanicException(BaseException):
    """As PyO3's, which `except Exception` does not see."""


class UnpicklableError(Exception):
    def __init__(self):
        super().__init__("cannot travel")
        self.lock = threading.Lock()


def double(request):
    if request is None:
        os.kill(os.getpid(), signal.SIGKILL)
    if request == "exit":
        os._exit(3)
    if request == "panic":
        raise PanicException("index out of bounds:\n1")
    if request == "unpicklable":
        raise UnpicklableError
    return 2 * request


def test_a_worker_answers_until_it_dies():
    worker = Worker(doubling)
    assert worker.ask(4) == 8
    with pytest.raises(TypeError):
        worker.ask({})
    with pytest.raises(ChildProcessError, match="failed: PanicException: index out of bounds: 1"):
        worker.ask("panic")
    with pytest.raises(ChildProcessError, match=r"failed: .*lock"):
        worker.ask("unpicklable")
    assert worker.ask(5) == 10
    with pytest.raises(ChildProcessError, match=r"\(pid \d+\) was killed by SIGKILL \(.*memory"):
        worker.ask(None)
    worker.stop()
    worker = Worker(doubling)
    with pytest.raises(ChildProcessError, match="ended with exit status 3$"):
        worker.ask("exit")
    worker.stop()


def first_is_slow():
    return slowest_first


@pytest.mark.parametrize("workers", [0, 2])
def test_items_and_answers_in_order(workers):
    answers = list(map_in_order(iter(range(30)), first_is_slow, workers))
    assert [(item, number) for item, (number, _) in answers] == [(n, n) for n in range(30)]
    processes = {process for _, (_, process) in answers}
    assert len(processes) == max(workers, 1) and (os.getpid() in processes) == (not workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_items_comes_after_those_before_it(workers):
    def items():
        yield from range(3)
        raise OSError("damaged")

    found = []
    with pytest.raises(OSError, match="damaged"):
        for item, _ in map_in_order(items(), doubling, workers):
            found.append(item)
    assert found == [0, 1, 2]


def test_few_items_are_in_memory():
    read = []

    def items():
        for number in range(100):
            read.append(number)
            yield number

    mapped = map_in_order(items(), doubling, 2)
    for place, (item, double_of_item) in zip(range(20), mapped, strict=False):
        assert (item, double_of_item) == (place, 2 * place)
        assert len(read) <= place + 9
    mapped.close()


def test_a_death_and_an_error_of_a_worker():
    with pytest.raises(ChildProcessError, match="a worker process .* was killed by SIGKILL"):
        list(map_in_order(iter([1, None, 2]), doubling, 2))
    with pytest.raises(TypeError):
        list(map_in_order(iter([1, {}, 2]), doubling, 2))
