"""Ranks of a tensor-parallel group as threads, for functions that need no more than all-gathers and
sums of the tokens of a micro batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.features.experts import balance, exchange
from megatron.features.experts.exchange import SharedTokens
from megatron.parallel.mesh import Group


class Threads:
    """A process group for :mod:`megatron.features.experts.exchange`."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def all(self, value: Tensor, rank: int) -> list[Tensor]:
        self.barrier.wait()
        self.values[rank] = value.detach().clone()
        self.barrier.wait()
        return list(self.values)


_rank = threading.local()


@contextmanager
def collectives_of_threads() -> Iterator[None]:
    def all_rows(x_TX: Tensor, group: Group) -> Tensor:
        return torch.cat(group.handle.all(x_TX, group.rank))

    def all_reduce(x: Tensor, group: Threads) -> None:
        x.copy_(torch.stack(group.all(x, _rank.number)).sum(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "all_rows", all_rows)
        for module in (exchange, balance):
            patch.setattr(module, "dist", SimpleNamespace(all_reduce=all_reduce))
        yield


def on_ranks(
    size: int, samples: int, length: int, sliced: bool, work: Callable[[SharedTokens], Any]
) -> list[Any]:
    """The results of ``work`` with the tokens of each rank."""
    handle = Threads(size)

    def one(rank: int) -> Any:
        _rank.number = rank
        group = Group(tuple(range(size)), rank, handle)
        try:
            return work(SharedTokens(samples, length, group, sliced))
        except BaseException:
            handle.barrier.abort()
            raise

    with collectives_of_threads(), ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def part_of(x_TX: Tensor, tokens: SharedTokens) -> Tensor:
    """This rank's tokens of the micro batch, zeros for padding."""
    size, rank = tokens.group.size, tokens.group.rank
    if tokens.sliced:
        return x_TX.unflatten(0, (tokens.samples, size, -1))[:, rank].flatten(0, 1)
    share = -(-len(x_TX) // size)
    part = x_TX[rank * share : (rank + 1) * share]
    return torch.cat([part, part.new_zeros(share - len(part), *part.shape[1:])])


def joined(parts: list[Tensor], samples: int, count: int, sliced: bool) -> Tensor:
    """The inverse of :func:`part_of` on all ranks, without padding."""
    if not sliced:
        return torch.cat(parts)[:count]
    return torch.cat([part.unflatten(0, (samples, -1)) for part in parts], 1).flatten(0, 1)
