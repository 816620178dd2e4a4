"""A rank's program at the user's own size, on tensors without values.

One layer of each kind runs forward and backward on fake tensors. This checks shapes, records
collectives, and counts the bytes saved for the backward pass. Tokens are distributed evenly over
the experts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.apps.parity.symbolic.groups import Fault, SimulatedGroup
from megatron.apps.parity.symbolic.miniature import axes_of
from megatron.apps.parity.symbolic.simulate import batches_of
from megatron.apps.parity.symbolic.sizes import groups_of
from megatron.apps.parity.symbolic.world import World
from megatron.apps.planning.activations import activation_bytes, expert_bytes
from megatron.config import RunConfig
from megatron.families import trained_spec
from megatron.features.evaluation.evaluator import default_dtype
from megatron.features.experts import exchange
from megatron.features.experts.flags import ExpertsConfig
from megatron.kernels import cpu_kernels, sums
from megatron.model.layer_list import LayerSpec, layer_sequence
from megatron.model.spec import training_dtype
from megatron.parallel.collectives import all_gather_flat
from megatron.parallel.mesh import AXES, Coordinates, Group, Mesh
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel, sum_later
from megatron.run.run import Run, run_data

_SAME = ("_to_copy", "clone", "detach", "alias", "view", "_unsafe_view", "copy_", "lift_fresh")
"""Operators that are not compared, because they depend only on dtypes and strides."""


@dataclass(frozen=True)
class SentTensors:
    """A traced collective: its layer, its kind, the axes of its group, and the number of elements
    and bytes that the rank sends."""

    layer: str
    backward: bool
    kind: str
    axes: tuple[str, ...]
    elements: int
    bytes: int
    line: str


@dataclass
class ProgramTrace:
    """Record of a rank's program.

    Attributes:
        layers: names of the layers of each kind, keyed by the layer that ran.
        sent: collectives in order.
        kept: bytes saved for the backward pass of each layer, without parameters.
        parameters: number of parameter elements on the rank, for each layer.
        operators: names of the operators that ran.
    """

    at: Coordinates
    layers: dict[str, list[str]] = field(default_factory=dict)
    sent: list[SentTensors] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    operators: set[str] = field(default_factory=set)

    @property
    def order(self) -> list[tuple[str, bool, str, tuple[str, ...]]]:
        """Collectives without sizes. Equal neighbours are merged, because the number of chunks in a
        loss depends on the size."""
        order: list[tuple[str, bool, str, tuple[str, ...]]] = []
        for each in self.sent:
            key = each.layer, each.backward, each.kind, each.axes
            if not order or order[-1] != key:
                order.append(key)
        return order


class _Operators(TorchDispatchMode):
    """Dispatch mode that records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _SAME:
            self.names.add(name)
        if name == "index" and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            # The mask selects all positions, since no token is dropped.
            mask = args[1][0]
            return args[0].new_empty(mask.numel(), *args[0].shape[mask.dim() :])
        return func(*args, **(kwargs or {}))


class _EvenCounts(TorchFunctionMode):
    """Function mode that records the number of sorted rows, so that no tensor is read for it."""

    rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.sort and args[0].dtype == torch.int64:  # experts chosen by the router
            _EvenCounts.rows = args[0].numel()
        return func(*args, **(kwargs or {}))


def even(rows: int, parts: int) -> list[int]:
    """Return ``parts`` counts that sum to ``rows`` and differ by at most one."""
    each, over = divmod(rows, parts)
    return [each + (part < over) for part in range(parts)]


class _EvenPlan(exchange.RowPlan):
    """Exchange plan in which every rank sends equal numbers of rows."""

    def __init__(self, counts_E: Tensor, group: Group) -> None:
        whole = counts_E.new_empty(group.size * len(counts_E))
        all_gather_flat(whole, counts_E, group=group.handle)
        counts = even(_EvenCounts.rows, len(counts_E))
        each = len(counts) // group.size
        self.group = group
        self.sent = [sum(counts[p * each : (p + 1) * each]) for p in range(group.size)]
        mine = counts[group.rank * each : (group.rank + 1) * each]
        self.received = [sum(mine)] * group.size
        self.sizes = [count * group.size for count in mine]
        self.by_expert = self.by_rank = torch.arange(sum(self.sizes))


def traced(
    config: RunConfig, state: Any, at: Mapping[str, int], dtype: torch.dtype
) -> ProgramTrace:
    """Trace one layer of each kind on the rank at the coordinates ``at``. ``state`` is a batch for
    the first layer, with values."""
    sizes = axes_of(config)
    rank = 0
    for axis in AXES:
        rank = rank * sizes[axis] + at.get(axis, 0)
    world = World(math.prod(sizes.values()), values=False)
    world.rank = rank
    groups = {
        axes: Group(g.ranks, g.rank, SimulatedGroup(world, g.ranks, rank, " x ".join(axes)))
        for axes, g in groups_of(sizes, rank).items()
    }
    whole = tuple(range(world.size))
    mesh = Mesh(Group(whole, rank, SimulatedGroup(world, whole, rank, "all")), sizes, groups)
    return world.run_alone(rank, lambda: _traced(config, state, mesh, world, dtype))


def _traced(
    config: RunConfig, state: Any, mesh: Mesh, world: World, dtype: torch.dtype
) -> ProgramTrace:
    tensor = TensorParallel.of(mesh, config.parallel)
    spec = trained_spec(config).divided(tensor.context)
    trace, operators = ProgramTrace(dict(mesh.coordinates)), _Operators()
    layers = spec.layers(tensor)
    begin = spec.begin(state)
    with ExitStack() as opened:
        opened.enter_context(_as_on_gpus())
        opened.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        opened.enter_context(default_dtype(dtype))
        specs = _one_of_each_kind(layers, trace)
        tied: dict[str, nn.Module] = {}
        modules = []
        for each in specs:
            module = tied.get(each.tied_key or "") or each.build()
            if each.tied_key is not None:
                tied[each.tied_key] = module
            modules.append(module.train())
            own = () if module in modules[:-1] else module.parameters()
            trace.parameters[each.name] = sum(param.numel() for param in own)
        sum_later(p for module in modules for p in module.parameters())
        sequence = layer_sequence(specs, 0, modules, config.parallel)
        params = {p.untyped_storage()._cdata for m in modules for p in m.parameters()}
        opened.enter_context(operators)
        opened.enter_context(_EvenCounts())
        marks: list[tuple[int, str]] = []
        if len(sequence.steps) == len(specs):
            for place, (each, step) in enumerate(zip(specs, sequence.steps, strict=True)):
                sequence.steps[place] = step[0], _watched(step[1], each.name, trace, params)
        calls = world.calls[mesh.world.rank]
        end = _run(sequence, begin, marks, calls, [each.name for each in specs])
        forward = len(calls)
        spec.total(end.losses).backward()
    trace.operators = operators.names
    trace.sent = _sent(calls, marks, forward)
    return trace


def _run(
    sequence: Any, state: Any, marks: list[tuple[int, str]], calls: list[Any], names: Sequence[str]
) -> Any:
    """Run the layers in order, and record in ``marks`` where each layer's collectives begin."""
    for place, (_, step) in enumerate(sequence.steps):
        marks.append((len(calls), names[min(place, len(names) - 1)]))
        state = step(state)
    return state


def _sent(
    calls: Sequence[tuple[tuple[int, ...], Any]],
    marks: Sequence[tuple[int, str]],
    forward: int,
) -> list[SentTensors]:
    sent = []
    for number, (_, call) in enumerate(calls):
        layer = ""
        if number < forward:
            layer = [name for start, name in marks if start <= number][-1]
        axes = tuple(call.group.split(" x ")) if call.group else ()
        elements = sum(x.numel() for x in call.sends)
        sent.append(
            SentTensors(layer, number >= forward, call.kind, axes, elements, call.bytes, call.line)
        )
    return sent


def _watched(step: Any, name: str, trace: ProgramTrace, params: set[int]) -> Any:
    """Wrap a step so that the bytes saved for its backward pass are counted in ``trace.kept``."""
    seen: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in params and storage._cdata not in seen:
            seen[storage._cdata] = x
            trace.kept[name] = trace.kept.get(name, 0) + storage.nbytes()
        return x

    def watched(state: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return step(state)

    return watched


def _one_of_each_kind(layers: Sequence[LayerSpec], trace: ProgramTrace) -> list[LayerSpec]:
    """Return the first layer of each kind. A kind has the same class, shapes and shards."""
    chosen: dict[Any, LayerSpec] = {}
    for layer in layers:
        module = layer.build()
        facts = tuple((n, shard_of(p), tuple(p.shape)) for n, p in module.named_parameters())
        forward = getattr(layer.forward, "__qualname__", layer.forward)
        key = type(module), facts, layer.tied_key, forward, layer.block
        first = chosen.setdefault(key, layer)
        trace.layers.setdefault(first.name, []).append(layer.name)
    return list(chosen.values())


@contextmanager
def _as_on_gpus() -> Iterator[None]:
    """In this context, distribute tokens evenly over experts, use torch's attention, and compute
    all rows of a tensor at once."""
    replaced: list[tuple[Any, str, Any]] = [
        (exchange, "RowPlan", _EvenPlan),
        (FakeTensor, "tolist", lambda self: even(_EvenCounts.rows, self.shape[-1])),
        (cpu_kernels, "suits", lambda *_: False),
        (cpu_kernels, "CHUNK", sys.maxsize),
        (sums, "WORK_BYTES", sys.maxsize),
    ]
    with ExitStack() as opened:
        for owner, name, value in replaced:
            opened.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def sampled_places(config: RunConfig) -> list[dict[str, int]]:
    """Return the coordinates to trace: the first rank, and the second and last along each axis."""
    sizes = axes_of(config)
    places: list[dict[str, int]] = [{}]
    for axis in ("tensor", "context", "expert"):
        for place in sorted({1, sizes[axis] - 1} - {0}):
            if place < sizes[axis]:
                places.append({axis: place})
    return places


def check_program(run: Run, small: Run) -> dict[str, Any]:
    """Trace a run's program on sampled ranks, trace the small model's, and compare the traces.
    Return counts, and memory next to the planner's estimate. Raises Fault if ranks call different
    collectives, or the small model calls others than the large one."""
    dtype, traces = training_dtype(run.config), []
    batch = next(batches_of(run_data(run), run.config, Mesh()))
    for at in sampled_places(run.config):
        traces.append(traced(run.config, batch, at, dtype))
        _compare(traces[0], traces[-1], f"rank at {at}", sizes=True)
    batch = next(batches_of(run_data(small), small.config, Mesh()))
    little = traced(small.config, batch, {}, dtype)
    _compare(traces[0], little, "the small model of the simulated ranks", sizes=False)
    first = traces[0]
    block, kept, plan = block_bytes(run, first)
    total = sum(count * len(first.layers[name]) for name, count in first.parameters.items())
    only = sorted(first.operators - little.operators)
    return {
        "ranks traced": len(traces),
        "kinds of layers traced": len(first.layers),
        "collectives of these": len(first.sent),
        "operators": len(first.operators),
        "operators at this size only": " ".join(only) or "none",
        "parameters of all stages of a rank": total,
        f"MiB that {block} keeps": kept // 2**20,
        "MiB by plan": int(plan) // 2**20,
        f"MiB that {block} sends": sum(s.bytes for s in first.sent if s.layer == block) // 2**20,
    }


def block_bytes(run: Run, trace: ProgramTrace) -> tuple[str, int, float]:
    """Return the name of the first block in a trace, the bytes that it saves for the backward pass,
    and the planner's estimate of these bytes."""
    block = next((name for name in trace.layers if "layers." in name), "")
    layout, model = run.config.layout(run.content), run.config.model
    micro = run.config.training.micro_batch_size
    plan = activation_bytes(model, layout, micro).block
    if model.part(ExpertsConfig).experts_of(0):
        plan += expert_bytes(model, layout, micro)
    return block, trace.kept.get(block, 0), plan


def _compare(first: ProgramTrace, other: ProgramTrace, what: str, sizes: bool) -> None:
    """Compare two programs' collectives and, with ``sizes``, parameters. Raises Fault for the first
    difference."""
    names = {
        name: place
        for trace in (first, other)
        for place, name in enumerate(dict.fromkeys(trace.layers))
    }
    orders = [
        [(names.get(layer, -1), *rest) for layer, *rest in trace.order] for trace in (first, other)
    ]
    for number, (one, two) in enumerate(zip_longest(*orders)):
        if one != two:
            lines = [s.line for s in first.sent] + ["the end"]
            raise Fault(
                f"collective {number} of {what} is {two}, and {one} on the first rank (layer, "
                f"backward, kind, axes), near {lines[min(number, len(lines) - 1)]}"
            )
    if sizes and first.parameters != other.parameters:
        raise Fault(f"{what} has {other.parameters} parameters, {first.parameters} the first rank")
