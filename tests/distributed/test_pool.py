"""The pool itself: it must report every way to fail, and continue."""

import os
import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from pool import MOST_THREADS, RankError, tensor_group

STAY = threading.Event()


@dataclass(frozen=True)
class Addend:
    """A class of the test's module may travel."""

    value: float


def total(addend: Addend) -> Addend:
    group = tensor_group()
    x = torch.tensor(addend.value + group.rank)
    dist.all_reduce(x, group=group.handle)
    return Addend(float(x))


def raise_on_one() -> None:
    group = tensor_group()
    if group.rank == 1:
        raise ValueError("this rank is broken")
    dist.all_reduce(torch.zeros(1), group=group.handle)


def hang_on_one() -> None:
    if tensor_group().rank == 1:
        sleep_long()


def sleep_long() -> None:
    time.sleep(1000)


def die_on_one() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


def leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    os.chdir("/")
    dist.init_process_group("gloo")


def leave_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=STAY.wait, daemon=True).start()
    return os.getpid()


def find_traces() -> tuple[bool, torch.dtype, str, bool, int]:
    return (
        "LEFT_BEHIND" in os.environ,
        torch.get_default_dtype(),
        os.getcwd(),
        dist.is_initialized(),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("size", [2, 1, 4, 2])
def test_runs_with_fresh_groups(pool, size):
    expected = Addend(10.0 * size + size * (size - 1) / 2)
    assert pool.run(size, total, Addend(10.0)) == [expected] * size


def test_a_job_leaves_nothing_behind(pool):
    pool.run(2, leave_traces)
    clean = (False, torch.float32, os.getcwd(), False, 1)
    assert pool.run(2, find_traces) == [clean] * 2


@pytest.mark.parametrize("count", [1, MOST_THREADS])
def test_a_worker_that_holds_many_threads_is_replaced(pool, count):
    before = pool.run(2, leave_threads, count)
    after = pool.run(2, leave_threads, 0)
    assert (set(before) & set(after) == set()) == (count == MOST_THREADS)


def test_one_that_died_between_two_jobs_fails_one_test_only(pool):
    assert pool.run(1, total, Addend(1.0)) == [Addend(1.0)]
    pool._workers[0].process.kill()
    pool._workers[0].process.join()
    with pytest.raises(OSError):
        pool.run(1, total, Addend(1.0))
    assert pool.run(1, total, Addend(1.0)) == [Addend(1.0)]


@pytest.mark.parametrize(
    "function, told",
    [
        (raise_on_one, ["rank 1 of 2: raised", "this rank is broken", "raise_on_one"]),
        (hang_on_one, ["rank 1 of 2: still running (the limit is 3 s)", "sleep_long"]),
        (die_on_one, ["rank 1 of 2: died with exit code 7"]),
    ],
    ids=["raises", "hangs", "dies"],
)
def test_failures_are_told_and_the_pool_continues(pool, function, told):
    # The workers must be up, or the limit would be spent on their start.
    pool.run(2, find_traces)
    started = time.monotonic()
    with pytest.raises(RankError) as raised:
        pool.run(2, function, timeout=3.0 if function is hang_on_one else 20.0)
    assert time.monotonic() - started < 30
    assert all(text in str(raised.value) for text in told), str(raised.value)
    assert pool.run(2, total, Addend(0.0)) == [Addend(1.0)] * 2
