"""Process groups of simulated ranks: torch's interface for collectives, and their results.

The groups implement collectives of ``torch.distributed`` and ``torch.ops._c10d_functional``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).parents[4]
_HERE = str(Path(__file__).parent)
_PACKAGE = str(ROOT / "megatron")
_FRAMES = 2
"""Number of source lines that locate a call: its own line, and callers' lines in other files."""

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
}
_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "mean": lambda x: x.mean(0),
    "product": lambda x: x.prod(0),
}


def _named(opts: Any) -> str:
    """Return the name of the reduction in a collective's options."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return next(name for kind, name in _NAMES.items() if op == kind)


class Fault(Exception):
    """Raised for a difference from one process, or between ranks. The message describes it."""


def source_line() -> str:
    """Return the location of the running call in the trainer, relative to the repository: its line,
    and the line of its caller in another file."""
    lines: list[str] = []
    frame, last = sys._getframe(1), ""
    while frame is not None and len(lines) < _FRAMES:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_HERE) and name != last:
            lines.append(f"{name.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}")
            last = name
        frame = frame.f_back  # type: ignore[assignment]
    return ", called from ".join(lines) or "the check itself"


@dataclass
class Call:
    """One rank's call of a collective.

    Attributes:
        kind: name of the collective, with its reduction.
        sends: flat copies of the rank's inputs.
        into: tensors that receive the result.
        facts: values that must be equal on all members of the group.
        splits: for an all-to-all, the numbers of elements sent to and received from each rank.
        group: name of the group.
    """

    rank: int
    kind: str
    sends: list[Tensor]
    into: list[Tensor]
    facts: tuple[Any, ...]
    line: str
    splits: tuple[list[int], list[int]] | None = None
    result: list[Tensor] | None = None
    equal: bool = False
    group: str = ""

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.sends)

    def __str__(self) -> str:
        shapes = " + ".join(str(x.numel()) for x in self.sends) or "nothing"
        return f"{self.kind} of {shapes} elements at {self.line}"


class RunningRanks(Protocol):
    """Interface through which groups access the running ranks.

    Attributes:
        values: whether tensors have values.
        unfinished: calls that no rank has waited for yet.
    """

    values: bool
    unfinished: dict[int, Call]

    def post(self, group: SimulatedGroup, call: Call) -> None:
        """Start a collective of a group with the running rank's call."""

    def wait_for(self, call: Call) -> None:
        """Let other ranks run until the call has a result."""


class SimulatedWork(dist.Work):
    """Handle of a collective that has started."""

    def __init__(self, world: RunningRanks, call: Call) -> None:
        super().__init__()
        self.world, self.call, self.done = world, call, False

    def is_completed(self) -> bool:
        completed = self.call.result is not None
        if completed and not self.call.into:  # A send has no result to deliver.
            self.world.unfinished.pop(id(self.call), None)
        return completed

    def wait(self, timeout: Any = None) -> bool:
        if not self.done:
            self.world.wait_for(self.call)
            self.done = True
            self.world.unfinished.pop(id(self.call), None)
            with torch.no_grad():
                for tensor, value in zip(self.call.into, self.call.result or (), strict=True):
                    tensor.detach().view(-1).copy_(value.reshape(-1))
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A process group, as one rank's handle."""

    def __init__(self, world: RunningRanks, ranks: tuple[int, ...], rank: int, name: str) -> None:
        super().__init__(ranks.index(rank), len(ranks))  # type: ignore[call-arg]
        self.world, self.ranks, self.me, self.key = world, ranks, rank, name

    def getBackendName(self) -> str:  # noqa: N802  torch calls it by this name
        return "simulated"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.key

    @property
    def group_desc(self) -> str:
        return self.key

    # torch's signatures have arguments and overloads that no caller uses.
    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:  # type: ignore[override]
        (x,) = [tensors] if isinstance(tensors, Tensor) else tensors
        op = _named(opts)
        return self._begin(f"all_reduce ({op})", [x], [x])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        op = _named(opts)
        return self._begin(f"all_reduce ({op})", tensors, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        return self._begin("all_gather", [inputs[0]], list(outputs[0]))

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> SimulatedWork:
        return self._begin("all_gather", [x], [output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        return self._begin("all_gather", inputs, outputs)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> SimulatedWork:
        op = _named(opts)
        return self._begin(f"reduce_scatter ({op})", [x], [output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        op = _named(opts)
        return self._begin(f"reduce_scatter ({op})", inputs, outputs)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, received: Any, sent: Any, opts: Any = None
    ) -> SimulatedWork:
        size = len(self.ranks)
        rows = (x.shape[0], output.shape[0])
        widths = [t[0].numel() if len(t) else 1 for t in (x, output)]
        splits = tuple(
            [n * width for n in (given or [count // size] * size)]
            for given, count, width in zip((sent, received), rows, widths, strict=True)
        )
        return self._begin("all_to_all", [x], [output], splits=splits)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> SimulatedWork:
        root = 0 if opts is None else opts.rootRank
        return self._begin(f"broadcast from {root}", tensors, tensors)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._begin("barrier", [], [])

    # Names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _begin(
        self, kind: str, sends: list[Tensor], into: list[Tensor], splits: Any = None
    ) -> SimulatedWork:
        sizes = () if splits is not None else tuple(x.numel() for x in sends)
        facts = kind, sizes, tuple(x.dtype for x in sends)
        inside = [x.detach().reshape(-1) for x in sends]
        if self.world.values:
            inside = [x.clone() for x in inside]
        call = Call(self.me, kind, inside, into, facts, source_line(), splits)
        self.world.post(self, call)
        return SimulatedWork(self.world, call)


def complete(kind: str, calls: Sequence[Call]) -> None:
    """Compute the results of a collective, given the calls of all its ranks in rank order."""
    name, _, op = kind.partition(" (")
    reduce = _REDUCED.get(op.rstrip(")"))
    sends = [call.sends for call in calls]
    if name == "all_reduce":
        stacked = [torch.stack(parts) for parts in zip(*sends, strict=True)]
        totals = [reduce(x) for x in stacked]  # type: ignore[misc]
        alike = bool(stacked) and all(bool((x == x[:1]).all()) for x in stacked)
        for call in calls:
            call.result, call.equal = totals, alike
    elif name == "all_gather":
        for call in calls:
            if len(call.into) == len(calls) and len(call.sends) == 1:
                call.result = [parts[0] for parts in sends]
            else:
                call.result = [torch.cat(parts) for parts in zip(*sends, strict=True)]
    elif name == "reduce_scatter":
        totals = [reduce(torch.stack(p)) for p in zip(*sends, strict=True)]  # type: ignore[misc]
        for place, call in enumerate(calls):
            call.result = [total.chunk(len(calls))[place] for total in totals]
    elif name == "all_to_all":
        parts = [call.sends[0].split(call.splits[0]) for call in calls]  # type: ignore[index]
        for place, call in enumerate(calls):
            call.result = [torch.cat([row[place] for row in parts])]
    elif name.startswith("broadcast"):
        for call in calls:
            call.result = sends[int(name.rpartition(" ")[2])]
    else:
        for call in calls:
            call.result = []


def check_exchange(ranks: Sequence[int], calls: Sequence[Call]) -> None:
    """Check an all-to-all. Raises Fault if a rank expects a different count than a peer sends."""
    if calls[0].splits is None:
        return
    for source, sending in enumerate(calls):
        for target, receiving in enumerate(calls):
            sent = sending.splits[0][target]  # type: ignore[index]
            expected = receiving.splits[1][source]  # type: ignore[index]
            if sent != expected:
                raise Fault(
                    f"rank {ranks[source]} sends {sent} elements to rank {ranks[target]} in "
                    f"{sending}, which expects {expected} at {receiving.line}"
                )
