"""Collectives in shared memory, on 2 to 4 ranks, against sums that every rank makes by itself and
against gloo's."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankError, tensor_group
from torch import Tensor

from megatron.parallel import collectives, host_memory
from megatron.parallel.collectives import (
    start_all_reduce,
    start_gather_sequence,
    start_scatter_sequence,
)
from megatron.parallel.groups import Group, build_groups
from megatron.parallel.host_memory import HostMemory

SIZES = [2, 3, 4]
TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]
COUNTS = [1, 7, 1000, 2**16 + 3, 5, 300_001]
"""Elements: odd ones, growing past what the memory holds, and small again."""


def memory_of(group: Group) -> HostMemory:
    found = vars(group)[collectives._HOST]
    assert isinstance(found, HostMemory), "the ranks are on one host"
    return found


def addend(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return (8 * torch.randn(count, generator=generator, dtype=torch.float64)).to(dtype)


def exact_sum(size: int, count: int, dtype: torch.dtype) -> Tensor:
    """In the order of ranks; 16 bits in float32 and rounded once, as one addition rounds it."""
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    parts = [addend(rank, count, dtype).to(wide) for rank in range(size)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def reduce_all() -> None:
    group = tensor_group()
    for dtype in TYPES:
        for count in COUNTS:
            x = addend(group.rank, count, dtype)
            assert start_all_reduce(x, group)() is x
            assert torch.equal(x, exact_sum(group.size, count, dtype)), (dtype, count)
    memory_of(group)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_against_local_sum(pool, size):
    pool.run(size, reduce_all)


def against_gloo() -> None:
    """Sequence collectives, float64; gloo is what another view of the group is made to use."""
    group = tensor_group()
    plain = Group(group.ranks, group.rank, group.handle)
    vars(plain)[collectives._HOST] = None
    for batch, width in ((1, 5), (3, 7)):
        x_BSH = torch.stack(
            [addend(group.rank + b, 6 * group.size * width, torch.float64) for b in range(batch)]
        ).view(batch, 6 * group.size, width)
        for start in (start_gather_sequence, start_scatter_sequence):
            found, expected = start(x_BSH, group)(), start(x_BSH, plain)()
            assert found.shape == expected.shape
            # A transposed view goes in as it is.
            flipped = start(x_BSH.flip(2).flip(2), group)()
            assert torch.equal(flipped, found)
            if start is start_gather_sequence:
                assert torch.equal(found, expected)
            else:
                torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    memory_of(group)


@pytest.mark.parametrize("size", SIZES)
def test_sequence_collectives_against_gloo(pool, size):
    pool.run(size, against_gloo)


def overlapping(steps: int) -> None:
    """More are under way than the memory has slots, of growing sizes, and finished in another
    order; ranks come late by turns."""
    group = tensor_group()
    for step in range(steps):
        if step % group.size == group.rank:
            time.sleep(0.002)
        counts = [3 + step, 40_000 * (1 + step % 3), 11, 2 + 70_000 * (step % 2), 5]
        values = [addend(group.rank, count, torch.float32) for count in counts]
        finishes = [start_all_reduce(x, group) for x in values]
        for place in (3, 0, 4, 2, 1):
            found = finishes[place]()
            assert torch.equal(found, exact_sum(group.size, counts[place], torch.float32))
        assert finishes[0]() is values[0]  # once more changes nothing
        assert torch.equal(values[0], exact_sum(group.size, counts[0], torch.float32))
    memory_of(group)


@pytest.mark.parametrize("size", [2, 4])
def test_many_under_way(pool, size):
    pool.run(size, overlapping, 30)


def result_before_others_read() -> None:
    """What a rank writes stays until all have read it, however far the rank runs ahead: two are
    under way, as many as there are slots, when another rank falls behind."""
    group = tensor_group()
    for step in range(20):
        values = [torch.full((1000,), 2.0 * step + n + group.rank) for n in range(2)]
        finishes = [start_all_reduce(x, group) for x in values]
        if group.rank == 1:
            time.sleep(0.01)
        for n, finish in enumerate(finishes):
            expected = sum(2.0 * step + n + rank for rank in range(group.size))
            assert (finish() == expected).all(), (step, n)


def test_a_slow_reader(pool):
    pool.run(3, result_before_others_read)


def files_held() -> list[str]:
    group = tensor_group()
    for count in COUNTS:
        start_all_reduce(torch.ones(count), group)()
    memory_of(group)
    opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [name for name in opened if "megatron" in name]


def test_memory_has_no_name_and_old_memory_goes(pool):
    """Of several sizes each rank holds the last, its own and the others', in deleted files."""
    for names in pool.run(2, files_held):
        assert len(names) == 2
        assert all(name.endswith("(deleted)") for name in names)


def peer_dies() -> None:
    dist.init_process_group("gloo")
    group = build_groups(dist.get_world_size(), 1).tensor
    x = torch.ones(10)
    start_all_reduce(x, group)()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_all_reduce(x, group)()


def test_a_dead_peer_is_an_error(pool):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of the group ended during a collective"):
        pool.run(2, peer_dies)
    assert time.monotonic() - start < 60


def peer_stays_away() -> None:
    dist.init_process_group("gloo")
    group = build_groups(dist.get_world_size(), 1, timeout=timedelta(seconds=5)).tensor
    x = torch.ones(10)
    start_all_reduce(x, group)()
    if group.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 of the group did not come.*within 5 s"):
            start_all_reduce(x, group)()
    dist.barrier()


def test_a_late_peer_is_an_error(pool):
    pool.run(2, peer_stays_away)


def refused(name: str, value: str) -> bool:
    if int(os.environ["RANK"]) == 1:
        os.environ[name] = value
    group = tensor_group()
    x = torch.ones(10)
    start_all_reduce(x, group)()
    assert (x == group.size).all()
    return vars(group)[collectives._HOST] is None


def test_one_rank_can_refuse(pool):
    assert pool.run(3, refused, host_memory.DISABLED, "1") == [True] * 3
    assert pool.run(3, refused, "UNRELATED", "1") == [False] * 3


def large() -> None:
    group = tensor_group()
    x = torch.ones(host_memory.LARGEST_BYTES // 4 + 1)
    start_all_reduce(x, group)()
    assert (x == group.size).all()
    assert collectives._HOST not in vars(group), "gloo does it"


def test_large_tensors_go_through_gloo(pool):
    pool.run(2, large)


def test_imports_no_other_package():
    source = Path(host_memory.__file__).read_text()
    assert "import megatron" not in source and "from megatron" not in source
