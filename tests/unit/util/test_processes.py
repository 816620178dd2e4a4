"""Work in other processes comes back in order, and a death is said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.util.processes import Worker, map_in_order, mapping_processes

ROOT = Path(__file__).parents[3]


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
    with pytest.raises(ChildProcessError, match="a worker process died"):
        list(map_in_order(iter([1, None, 2]), doubling, 2))
    with pytest.raises(TypeError):
        list(map_in_order(iter([1, {}, 2]), doubling, 2))


READS_LOST_PAGES = """
import mmap, os, sys
from megatron.util.processes import name_lost_pages
name_lost_pages()
with open(sys.argv[1], "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0)
    os.truncate(sys.argv[1], 100)
    print("before", end="")
    pages[2**16]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal's data are those of Linux")
def test_a_mapped_file_that_is_cut_short_is_named(tmp_path):
    """In place of death by SIGBUS, and what was printed before is not lost."""
    file = tmp_path / "long name.npy"
    file.write_bytes(bytes(2**17))
    command = [sys.executable, "-c", READS_LOST_PAGES, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "before"
    assert done.stderr.startswith(f"error: {file} was cut short or deleted while it was read, and ")
    assert done.stderr.count("\n") == 1
