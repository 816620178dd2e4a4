"""One rank of a layout, without the others: for counts of what a step sends and waits for.

A process runs the trainer as any rank of any number. What it would ask of the others it answers
itself, so that numbers mean nothing and every call, shape and byte is that of a real run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class Alone(dist.Store):
    """A store at which nobody else is: what another rank would have written is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._values.get(key, bytes(128))

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        pass

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)


@contextmanager
def without_others(rank: int, size: int) -> Iterator[None]:
    """Within the block this process is a rank of ``size``, and meets nobody."""
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from deepspeed.runtime.zero import utils as zero

    from megatron.features.agreement import agreement

    def gather(into: list[Any], own: Any, group: Any = None) -> None:
        into[:] = [own] * len(into)

    store, same = Alone(), "assert_ints_same_as_other_ranks"
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"} if size > 1 else {}
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, {k: str(v) for k, v in place.items()} | meeting)
        )
        for owner, name, new in (
            (dist, "all_gather_object", gather),
            (dist, "broadcast_object_list", lambda *_, **__: None),
            (agreement, "_connection", lambda *_, **__: store),
            (agreement.Agreement, "compare", lambda *_: None),
            (partitioned_param_coordinator, same, lambda *_: None),
            (zero, same, lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


Traffic = Counter[tuple[str, int]]
"""Calls of (operation, bytes of the whole: what is reduced, or what all ranks have together)."""

BACKEND = "counted"
traffic: Traffic = Counter()
"""Of all groups of this process, since it was cleared."""


class CountedGroup(dist.ProcessGroup):
    """A group whose other ranks have what this one has. Its operations are done when they are
    called, and counted in :data:`traffic`."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    @property
    def pg_name(self) -> str:
        return self.group_name

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _done("all_reduce", tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _done("all_reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _done("broadcast", tensors, tensors)

    def reduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return _done("reduce", tensors, tensors)

    def allgather(self, lists: list[list[Tensor]], own: list[Tensor], options: Any = None) -> Any:
        for parts, value in zip(lists, own, strict=True):
            for part in parts:
                part.copy_(value.clone().view_as(part))
        return _done("all_gather", lists[0], lists[0])

    def _allgather_base(self, whole: Tensor, own: Tensor, options: Any = None) -> Any:
        whole.view(self.size(), -1).copy_(own.reshape(1, -1).clone())
        return _done("all_gather", [whole], [whole])

    def allgather_into_tensor_coalesced(
        self, wholes: list[Tensor], own: list[Tensor], options: Any = None
    ) -> Any:
        for whole, value in zip(wholes, own, strict=True):
            whole.view(self.size(), -1).copy_(value.reshape(1, -1).clone())
        return _done("all_gather", wholes, wholes)

    def _reduce_scatter_base(self, own: Tensor, whole: Tensor, options: Any = None) -> Any:
        own.view(-1).copy_(whole.reshape(self.size(), -1)[self.rank()].clone())
        return _done("reduce_scatter", [whole], [own])

    def reduce_scatter_tensor_coalesced(
        self, own: list[Tensor], wholes: list[Tensor], options: Any = None
    ) -> Any:
        for value, whole in zip(own, wholes, strict=True):
            value.view(-1).copy_(whole.reshape(self.size(), -1)[self.rank()].clone())
        return _done("reduce_scatter", wholes, own)

    def reduce_scatter(self, own: list[Tensor], lists: list[list[Tensor]], options: Any) -> Any:
        for value, parts in zip(own, lists, strict=True):
            value.copy_(parts[self.rank()])
        return _done("reduce_scatter", lists[0], own)

    def alltoall_base(
        self, into: Tensor, own: Tensor, out_sizes: list[int], in_sizes: list[int], options: Any
    ) -> Any:
        into.zero_().view(-1)[: own.numel()].copy_(own.reshape(-1)[: into.numel()])
        return _done("all_to_all", [own], [into])

    def alltoall(self, into: list[Tensor], own: list[Tensor], options: Any = None) -> Any:
        for part, value in zip(into, own, strict=True):
            part.zero_().view(-1)[: value.numel()].copy_(value.reshape(-1)[: part.numel()])
        return _done("all_to_all", own, into)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    """From torch 2.13 on these are their names."""

    def barrier(self, opts: Any = None) -> Any:
        return _done("barrier", [], [])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return _done("send", tensors, tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        for tensor in tensors:
            tensor.zero_()
        return _done("receive", tensors, tensors)


def _done(operation: str, counted: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
    traffic[operation, sum(x.numel() * x.element_size() for x in counted)] += 1
    future: Any = torch.futures.Future()
    future.set_result(list(results))
    return torch._C._distributed_c10d._create_work_from_future(future)


@contextmanager
def counted_groups() -> Iterator[Traffic]:
    """Within the block gloo's groups are :class:`CountedGroup`; what they have counted."""

    def group(store: Any, rank: int, size: int, timeout: timedelta) -> CountedGroup:
        return CountedGroup(rank, size)

    initialise = dist.init_process_group
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, group, devices=["cpu"])

    def start(backend: Any = None, **options: Any) -> None:
        initialise(BACKEND, **options)

    traffic.clear()
    with (
        mock.patch.object(dist, "init_process_group", start),
        mock.patch.object(distributed_c10d, "init_process_group", start),
    ):
        yield traffic
