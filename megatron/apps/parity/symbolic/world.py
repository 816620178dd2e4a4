"""Simulated ranks: the programs of all processes of a layout, run in one process.

Each rank is a thread. One thread runs at a time, until it waits for others. Process groups are
Python objects (:mod:`megatron.apps.parity.symbolic.groups`), which compare the calls of their
members and report the source lines of a difference. If no rank can continue, all waiting ranks are
reported.

An asynchronous call delivers its result when the rank waits for it. Until then its output tensors
contain NaN, so that a program that reads them too early gets a wrong result, never one that happens
to be right.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron.apps.parity.symbolic.groups import (
    Call,
    Fault,
    SimulatedGroup,
    SimulatedWork,
    check_exchange,
    complete,
    source_line,
)
from megatron.parallel import later_products

_NATIVE: Any = torch._C._distributed_c10d


class Stopped(BaseException):
    """Raised in a rank's program to end it after another rank has failed."""


@dataclass
class Message:
    """A message between two ranks, as posted by one of them."""

    source: int
    target: int
    tensor: Tensor
    line: str
    sends: bool


class World:
    """Ranks that run as threads, one at a time.

    Attributes:
        values: True if tensors have values. Otherwise a single rank runs, and its collectives
          finish immediately.
        rank: the running rank.
        calls: each rank's collectives in order, with the ranks of their groups.
        unfinished: calls that no rank has waited for yet.
    """

    def __init__(self, size: int, values: bool = True) -> None:
        self.size, self.values, self.rank = size, values, 0
        self.calls: list[list[tuple[tuple[int, ...], Call]]] = [[] for _ in range(size)]
        self.unfinished: dict[int, Call] = {}
        self._groups: dict[tuple[int, str], SimulatedGroup] = {}
        self._created: list[tuple[int, ...]] = []
        self._creations = [0] * size
        self._sequence: dict[tuple[int, str], int] = defaultdict(int)
        self._open: dict[tuple[str, int], dict[int, Call]] = {}
        self._posted: dict[tuple[int, int, bool], deque[tuple[Call, Tensor]]] = defaultdict(deque)
        self._objects: dict[tuple[str, int], dict[int, Any]] = {}
        self._locks = [threading.Semaphore(0) for _ in range(size)]
        self._ready: deque[int] = deque(range(size))
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._ended: set[int] = set()
        self._over = threading.Event()
        self.failure: BaseException | None = None

    def group(self, ranks: Sequence[int], name: str) -> SimulatedGroup:
        """Return the running rank's handle of a group. The rank must be in ``ranks``."""
        key = self.rank, name
        if key not in self._groups:
            group = SimulatedGroup(self, tuple(ranks), self.rank, name)
            if self.values or self.size == 1:
                _NATIVE._register_process_group(name, group)
            self._groups[key] = group
        return self._groups[key]

    def new_group(self, ranks: Sequence[int] | None = None, **_: Any) -> Any:
        """Implement ``dist.new_group``. Raises Fault if ranks disagree on the members."""
        members = tuple(range(self.size)) if ranks is None else tuple(ranks)
        place = self._creations[self.rank]
        self._creations[self.rank] += 1
        if place == len(self._created):
            self._created.append(members)
        if self._created[place] != members:
            raise Fault(
                f"rank {self.rank} creates the group {members} where another rank creates "
                f"{self._created[place]}, at {source_line()}"
            )
        if self.rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        return self.group(members, f"group {place}")

    def post(self, group: SimulatedGroup, call: Call) -> None:
        """Start a collective. Raises Fault if the calls of the group's ranks do not match."""
        call.group = group.key
        self.calls[self.rank].append((group.ranks, call))
        if not self.values:
            call.result = [x.detach() for x in call.into]
            return
        place = self._sequence[self.rank, group.key]
        self._sequence[self.rank, group.key] += 1
        parts = self._open.setdefault((group.key, place), {})
        parts[self.rank] = call
        first = next(iter(parts.values()))
        if call.facts != first.facts:
            raise Fault(
                f"rank {self.rank}: {call}, where rank {first.rank} of the same group has {first} "
                f"(dtypes {[str(x.dtype) for x in call.sends]} and "
                f"{[str(x.dtype) for x in first.sends]})"
            )
        self.unfinished[id(call)] = call
        for tensor in call.into:
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))
        if len(parts) == len(group.ranks):
            del self._open[group.key, place]
            members = [parts[rank] for rank in group.ranks]
            check_exchange(group.ranks, members)
            complete(call.kind, members)

    def post_together(self, transfers: Sequence[Message]) -> list[SimulatedWork]:
        """Start sends and receives. Return when the partners have posted the matching messages."""
        works = []
        for each in transfers:
            kind = f"{'send to' if each.sends else 'receive from'} " + str(
                each.target if each.sends else each.source
            )
            flat = each.tensor.detach().reshape(-1)
            facts = tuple(each.tensor.shape), each.tensor.dtype
            call = Call(
                self.rank,
                kind,
                [flat.clone() if self.values else flat] if each.sends else [],
                [] if each.sends else [each.tensor],
                facts,
                each.line,
            )
            works.append(SimulatedWork(self, call))
            self.calls[self.rank].append(((each.source, each.target), call))
            if not self.values:
                call.result = list(call.into)
                continue
            self.unfinished[id(call)] = call
            if not each.sends and each.tensor.is_floating_point():
                each.tensor.detach().fill_(float("nan"))
            waiting = self._posted[each.source, each.target, not each.sends]
            if not waiting:
                self._posted[each.source, each.target, each.sends].append((call, each.tensor))
                continue
            other, _ = waiting.popleft()
            if other.facts != call.facts:
                raise Fault(
                    f"rank {self.rank}: {call} has {facts}, and rank {other.rank} {other} has "
                    f"{other.facts}"
                )
            sent, received = (call, other) if each.sends else (other, call)
            received.result, sent.result = list(sent.sends), []
        for work in works:
            self.wait_for(work.call)
        return works

    def exchange_objects(self, group: SimulatedGroup, value: Any) -> list[Any]:
        """Return the values of all ranks of a group, in rank order."""
        if not self.values:
            return [value] * len(group.ranks)
        key = f"{group.key} objects"
        place = self._sequence[self.rank, key]
        self._sequence[self.rank, key] += 1
        values = self._objects.setdefault((key, place), {})
        values[self.rank] = value
        self._until(
            lambda: len(values) == len(group.ranks), f"all_gather_object at {source_line()}"
        )
        return [values[rank] for rank in group.ranks]

    def wait_for(self, call: Call) -> None:
        if call.result is None:
            self._until(lambda: call.result is not None, str(call))

    def run(
        self,
        program: Callable[[int], Any],
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Any]:
        """Run a function on each rank, all within one context, and return their results. Raises the
        first error of any rank, or Fault if ranks deadlock or never wait for a call."""
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            _NATIVE._set_thread_isolation_mode(True)
            self._locks[rank].acquire()
            try:
                if self.failure is None:
                    self.rank = rank
                    results[rank] = program(rank)
            except Stopped:
                pass
            except BaseException as error:  # any error must end the other ranks
                if self.failure is None:
                    self.failure = error
                    error.add_note(f"on rank {rank} of {self.size}")
            self._ended.add(rank)
            self._next()

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(self.size)]
        with self._installed(), within():
            for thread in threads:
                thread.start()
            self._next()
            self._over.wait()
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure
        for call in self.unfinished.values():
            raise Fault(f"rank {call.rank}: {call} is never waited for")
        for key, left in self._posted.items():
            if left:
                call = left[0][0]
                raise Fault(f"rank {call.rank}: {call} has no partner {key[:2]}")
        return results

    def run_alone(self, rank: int, program: Callable[[], Any]) -> Any:
        """Run one rank's program in this thread. This requires ``values`` to be False."""
        assert not self.values
        self.rank = rank
        _NATIVE._set_thread_isolation_mode(True)
        try:
            with self._installed():
                return program()
        finally:
            _NATIVE._set_thread_isolation_mode(False)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Let other ranks run until a condition is true. ``what`` describes it in messages."""
        while not condition():
            me = self.rank
            self._waiting[me] = what, condition
            state = torch.get_rng_state(), later_products._left
            self._next()
            self._locks[me].acquire()
            self._waiting.pop(me, None)
            if self.failure is not None:
                raise Stopped
            self.rank = me
            torch.set_rng_state(state[0])
            later_products._left = state[1]

    def _next(self) -> None:
        """Wake the next rank that can continue. If none can, report a deadlock."""
        if not self._ready:
            if self.failure is None:
                self._ready.extend(r for r, (_, ready) in self._waiting.items() if ready())
            if not self._ready and self._waiting:
                if self.failure is None:
                    self.failure = Fault(self._deadlock())
                self._ready.append(next(iter(self._waiting)))
        if self._ready:
            self._locks[self._ready.popleft()].release()
        elif len(self._ended) == self.size:
            self._over.set()

    def _deadlock(self) -> str:
        lines = [f"rank {rank} waits in {what}" for rank, (what, _) in self._waiting.items()]
        shown = "\n  ".join(lines[:8] + [f"and {len(lines) - 8} more"] * (len(lines) > 8))
        ended = f"; {len(self._ended)} ranks have ended" if self._ended else ""
        return f"no rank can continue{ended}:\n  {shown}"

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """In this context, torch.distributed communicates between the simulated ranks."""
        world = self

        def whole() -> SimulatedGroup:
            return world.group(range(world.size), "world")

        def of(group: Any) -> SimulatedGroup:
            return whole() if group is None or group is dist.group else group

        class Everyone:
            """Substitute for ``dist.group``."""

            @property
            def WORLD(self) -> SimulatedGroup:  # noqa: N802  torch calls it by this name
                return whole()

        def batch(operations: Sequence[Any]) -> list[SimulatedWork]:
            me, line = world.rank, source_line()
            transfers = []
            for each in operations:
                sends = each.op is isend
                source, target = (me, each.peer) if sends else (each.peer, me)
                transfers.append(Message(source, target, each.tensor, line, sends))
            return world.post_together(transfers)

        def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> SimulatedWork:
            return world.post_together([Message(world.rank, dst, tensor, source_line(), True)])[0]

        def irecv(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> SimulatedWork:
            return world.post_together([Message(src, world.rank, tensor, source_line(), False)])[0]

        def gather_objects(into: list[Any], value: Any, group: Any = None) -> None:
            into[:] = world.exchange_objects(of(group), value)

        def send_objects(values: list[Any], src: int = 0, group: Any = None, **_: Any) -> None:
            members = of(group)
            everything = world.exchange_objects(members, list(values))
            values[:] = everything[members.ranks.index(src)]

        replaced = {
            "is_initialized": lambda: True,
            "get_rank": lambda group=None: of(group).ranks.index(world.rank),
            "get_world_size": lambda group=None: len(of(group).ranks),
            "get_backend": lambda group=None: "gloo",
            "get_process_group_ranks": lambda group=None: list(of(group).ranks),
            "get_global_rank": lambda group, rank: of(group).ranks[rank],
            "get_group_rank": lambda group, rank: of(group).ranks.index(rank),
            "new_group": self.new_group,
            "barrier": lambda group=None, **_: of(group).barrier().wait(),
            "all_gather_object": gather_objects,
            "broadcast_object_list": send_objects,
            "batch_isend_irecv": batch,
            "isend": isend,
            "irecv": irecv,
            "P2POp": PointToPoint,
            "group": Everyone(),
        }
        inside = {"_get_default_group": whole, "get_rank": replaced["get_rank"]}
        inside["get_world_size"] = replaced["get_world_size"]
        before = [(dist, name, getattr(dist, name)) for name in replaced]
        before += [(c10d, name, getattr(c10d, name)) for name in inside]
        for module, new in ((dist, replaced), (c10d, inside)):
            for name, value in new.items():
                setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


@dataclass
class PointToPoint:
    """Substitute for ``dist.P2POp``, whose peer is a global rank."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Any = None
    tag: int = 0
