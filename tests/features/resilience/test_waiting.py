"""Whether a process waits for other ranks, from what its threads do."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from megatron.features.resilience.watch import processes as waiting
from megatron.features.resilience.watch.processes import (
    call_site,
    collectives_begun,
    where_it_waits,
)
from megatron.features.resilience.watch.watchdog import Idleness
from megatron.util import phases
from megatron.util.phases import activity


@contextlib.contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[Callable[[], dict[int, FrameType]]]:
    """Runs ``work`` in a thread; gives the frames of all, as if that thread was the main one."""
    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def frames() -> dict[int, FrameType]:
        found = sys._current_frames()
        return {main if ident == thread.ident else -ident: f for ident, f in found.items()}

    yield frames
    thread.join(30)
    assert not thread.is_alive()


def soon(frames: Callable[[], dict[int, FrameType]]) -> FrameType | None:
    """Where the thread waits, as soon as it does."""
    end = time.monotonic() + 30
    while (found := where_it_waits(frames())) is None and time.monotonic() < end:
        time.sleep(0.01)
    return found


@pytest.fixture
def pair() -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """The two ends of a gloo group, both in this process."""
    store = dist.HashStore()
    made: dict[int, dist.ProcessGroup] = {}

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield made[0], made[1]


def test_a_rank_that_waits_for_a_transfer_is_told_from_one_that_works(pair):
    first, second = pair
    work = threading.Event()

    def waits() -> None:
        handle = first.allreduce([torch.ones(3)])
        handle.wait()

    with in_thread(waits) as frames:
        found = soon(frames)
        assert found is not None and found.f_code is waits.__code__
        assert "waits in " in call_site(found)
        second.allreduce([torch.ones(3)]).wait()
    with in_thread(lambda: work.wait(30)) as frames:
        time.sleep(0.05)
        assert where_it_waits(frames()) is None
        work.set()


def test_a_rank_that_waits_in_the_store_is_told():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def waits() -> None:
        store.wait(["key"], timedelta(seconds=30))

    with in_thread(waits) as frames:
        assert soon(frames) is not None
        dist.TCPStore("127.0.0.1", store.port).set("key", "1")


def test_code_with_constants_that_cannot_be_hashed(pair):
    """torch's compiler puts dictionaries among the constants of the code that it makes."""
    first, second = pair

    def waits() -> None:
        first.allreduce([torch.ones(3)]).wait()

    code = waits.__code__
    waits.__code__ = code.replace(co_consts=(*code.co_consts, {"a": 1}))
    with pytest.raises(TypeError):
        hash(waits.__code__)
    with in_thread(waits) as frames:
        assert soon(frames) is not None
        second.allreduce([torch.ones(3)]).wait()


def test_busy_and_sleeping_threads_work(pair):
    busy = threading.Event()

    def loops() -> None:
        while not busy.is_set():
            sum(range(100))

    with in_thread(loops) as frames:
        assert all(where_it_waits(frames()) is None for _ in range(20))
        busy.set()
    with in_thread(lambda: time.sleep(0.2)) as frames:
        assert where_it_waits(frames()) is None


def test_a_collective_in_the_background_counts_only_while_the_main_thread_waits_for_it(pair):
    """A save in the background meets other ranks while the main thread computes."""
    first, second = pair
    ended = threading.Event()

    def saves() -> None:
        first.allreduce([torch.ones(3)]).wait()

    saving = threading.Thread(target=saves)
    saving.start()
    with in_thread(lambda: time.sleep(0.2)) as frames:
        time.sleep(0.05)
        assert where_it_waits(frames()) is None
    with in_thread(ended.wait) as frames:
        assert soon(frames) is not None
        second.allreduce([torch.ones(3)]).wait()
        saving.join()
        ended.set()


def test_a_rank_that_imports_what_has_to_do_with_ranks_does_not_wait():
    work = threading.Event()
    for place in ("torch/distributed/elsewhere.py", "torch/distributed/tensor/ops.py"):
        imported = compile("work.wait(30)", f"/anywhere/{place}", "exec")
        with in_thread(lambda code=imported: exec(code, {"work": work})) as frames:
            time.sleep(0.05)
            assert where_it_waits(frames()) is None
            work.set()
        work.clear()


def test_collectives_of_a_library_are_progress(pair, monkeypatch):
    first, second = pair
    groups = dist.distributed_c10d._world.pg_map
    monkeypatch.setitem(groups, first, ("gloo", None))
    idleness, before = Idleness(activity), collectives_begun()
    idleness.count()
    idleness.count()
    assert idleness.ticks > 0
    handles = [group.allreduce([torch.ones(3)]) for group in pair]
    for handle in handles:
        handle.wait()
    assert collectives_begun() == before + 1
    idleness.count()
    assert idleness.ticks == 0
    phases.background_groups.add(first)
    idleness.count()  # what a thread in the background sends moves nobody else
    handles = [group.allreduce([torch.ones(3)]) for group in pair]
    for handle in handles:
        handle.wait()
    idleness.count()
    idleness.count()
    assert idleness.ticks == 2


@pytest.mark.parametrize(
    ("says", "busy"), [(True, True), (False, False), (RuntimeError, False), (None, True)]
)
def test_a_device_that_is_busy(monkeypatch, says, busy):
    """One whose driver does not answer, too."""
    forever = threading.Event()

    def ask():
        if says is None:
            forever.wait(30)
        if says is RuntimeError:
            raise RuntimeError("an illegal memory access")
        return says

    monkeypatch.setattr(waiting, "_DEVICE_SECONDS", 0.1)
    monkeypatch.setattr(activity, "device_busy", ask)
    assert waiting.device_is_busy() == busy
    forever.set()


def test_without_a_device_there_is_nothing_to_be_busy():
    assert activity.device_busy is None and not waiting.device_is_busy()
