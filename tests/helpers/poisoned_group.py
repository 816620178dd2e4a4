"""Process groups over gloo on which nothing arrives before it is waited for.

gloo is fast and works on the CPU's own memory, so that a program that forgets to wait, or writes to
a tensor that is being sent, nearly always gets the right numbers. On GPUs it would not. Here what a
collective writes is NaN until ``wait``, and what it reads must be at ``wait`` what it was at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "poisoned"

pending: dict[int, str] = {}
"""Works of this process that were started and not waited for."""


class Call(NamedTuple):
    """A call on a group of so many ranks, and the bytes that a rank sends in it: in a ring, as in
    Thakur, Rabenseifner and Gropp 2005 (section 4), where all ranks take part."""

    what: str
    ranks: tuple[int, ...]
    numbers: int
    sent: float


calls: list[Call] = []
"""Those of this process, in order."""


class EarlyUse(AssertionError):
    """A tensor of a collective was written before the collective was waited for."""


def _poison(x: Tensor) -> None:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        x.fill_(torch.nan)
    elif x.dtype != torch.bool:
        x.fill_(torch.iinfo(x.dtype).max)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _overlap(a: Tensor, b: Tensor) -> bool:
    (first, end), (other, last) = (
        (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in (a, b)
    )
    return first < last and other < end


class PoisonedWork(dist._Work):
    """A collective that runs on copies.

    Args:
        read: tensors that it reads only, ``written`` those that it writes.
        start: begins it on copies of both, in this order.
    """

    def __init__(
        self,
        what: str,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        start: Callable[[list[Tensor], list[Tensor]], dist.Work | None],
    ) -> None:
        super().__init__()
        self._what, self._written = what, list(written)
        # A rank may gather into the memory that its own part is in.
        self._read = [x for x in read if not any(_overlap(x, y) for y in written)]
        self._sent = [x.detach().clone(memory_format=torch.contiguous_format) for x in read]
        self._results = [x.detach().clone(memory_format=torch.contiguous_format) for x in written]
        self._work = start(self._sent, self._results)
        self._copies = [x.detach().clone() for x in self._read]
        self._done = False
        with torch.no_grad():
            for x in self._written:
                _poison(x.detach())
        self._poison = [x.detach().clone() for x in self._written]
        pending[id(self)] = what

    def wait(self, timeout: object = None) -> bool:
        if self._done:
            return True
        if self._work is not None:
            self._work.wait()
        for x, before in zip(self._read, self._copies, strict=True):
            if not _same(x.detach(), before):
                raise EarlyUse(f"{self._what}: what it reads was written before it was waited for")
        for x, poison in zip(self._written, self._poison, strict=True):
            if not _same(x.detach(), poison):
                raise EarlyUse(f"{self._what}: its result was written before it was waited for")
        with torch.no_grad():
            for x, result in zip(self._written, self._results, strict=True):
                x.detach().copy_(result)
        self._done = True
        pending.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done


class PoisonedGroup(dist.ProcessGroup):
    """A group of gloo's whose results come at ``wait``."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: object) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _work(
        self,
        what: str,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        start: Callable[[list[Tensor], list[Tensor]], dist.Work | None],
        sent: float | None = None,
    ) -> PoisonedWork:
        """A work; ``sent`` are elements that a rank sends, by default those of a ring."""
        x, size = [*read, *written][0], self.size()
        shares = {"all_reduce": 2 * (size - 1) / size, "all_gather": size - 1}
        count = x.numel() * shares.get(what, (size - 1) / size) if sent is None else sent
        ranks = tuple(dist.get_process_group_ranks(self))
        calls.append(Call(what, ranks, x.numel(), count * x.element_size()))
        return PoisonedWork(what, read, written, start)

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> PoisonedWork:
        return self._work("all_reduce", [], tensors, lambda _, x: self._gloo.allreduce(x, opts))

    def reduce(self, tensors: list[Tensor], opts: object) -> PoisonedWork:
        return self._work("reduce", [], tensors, lambda _, x: self._gloo.reduce(x, opts))

    def broadcast(self, tensors: list[Tensor], opts: object) -> PoisonedWork:
        return self._work("broadcast", [], tensors, lambda _, x: self._gloo.broadcast(x, opts))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None
    ) -> PoisonedWork:
        return self._work(
            "all_gather", inputs, outputs[0], lambda x, y: self._gloo.allgather([y], x)
        )

    def all_gather_single(self, output: Tensor, x: Tensor, opts: object = None) -> PoisonedWork:
        def start(sent: list[Tensor], results: list[Tensor]) -> dist.Work:
            parts = list(results[0].view(-1).chunk(self.size()))
            return self._gloo.allgather([parts], [sent[0].view(-1)])

        return self._work("all_gather", [x], [output], start)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: object) -> PoisonedWork:
        gloo = self._gloo
        scatter = getattr(gloo, "reduce_scatter_single", None) or gloo._reduce_scatter_base

        def start(sent: list[Tensor], results: list[Tensor]) -> dist.Work:
            return scatter(results[0].view(-1), sent[0].view(-1), opts)

        return self._work("reduce_scatter", [x], [output], start)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        received: list[int],
        sent: list[int],
        opts: object = None,
    ) -> PoisonedWork:
        gloo = self._gloo
        exchange = getattr(gloo, "all_to_all_single", None) or gloo.alltoall_base
        rows = sum(sent) - sent[self.rank()] if sent else len(x) * (1 - 1 / self.size())
        return self._work(
            "all_to_all",
            [x],
            [output],
            lambda a, b: exchange(b[0], a[0], received, sent),
            rows * x[:1].numel(),
        )

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], target: int, tag: int) -> PoisonedWork:
        count = tensors[0].numel()
        gloo = self._gloo
        return self._work("send", tensors, [], lambda x, _: gloo.send(x, target, tag), count)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> PoisonedWork:
        gloo = self._gloo
        return self._work("receive", [], tensors, lambda _, x: gloo.recv(x, source, tag), 0)

    def barrier(self, opts: object = None) -> PoisonedWork:
        return PoisonedWork("barrier", [], [], lambda *_: self._gloo.barrier())


@contextmanager
def poisoned() -> Iterator[dict[int, str]]:
    """Within it groups that are made for gloo are poisoned; yields :data:`pending`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, PoisonedGroup, devices=["cpu"])
    start = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: object, **kwargs: object) -> None:
        start(NAME if backend == "gloo" else backend, *args, **kwargs)

    pending.clear()
    calls.clear()
    with mock.patch.object(dist, "init_process_group", init_process_group):
        yield pending
