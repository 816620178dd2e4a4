"""Checks at the user's own size that run no model code: process groups, shards of parameters,
checkpoint slices, and the order of a pipeline's messages."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.apps.parity.symbolic.groups import Fault
from megatron.apps.parity.symbolic.miniature import axes_of
from megatron.checkpoint.slices import Slice, tiles
from megatron.config import RunConfig
from megatron.families import trained_spec
from megatron.model.layer_list import LayerSpec
from megatron.parallel import mesh as meshes
from megatron.parallel.mesh import AXES, Group, Mesh
from megatron.parallel.pipeline_schedules import PipelineSchedule
from megatron.parallel.shard import Shard, shard_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.parallel.timeline import Exchange, work_plan
from megatron.run.run import Run


def check_groups(config: RunConfig) -> dict[str, Any]:
    """Check that the groups along all combinations of axes are blocks of an array of all ranks
    whose last axis varies fastest. Also check the pipeline schedule. Raises Fault on an error."""
    sizes = axes_of(config)
    order = ("pipeline", "data", "context", "expert", "tensor")
    grid = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in order])
    count = 0
    for axes in meshes._COMBINATIONS:
        places = [place for place, axis in enumerate(order) if axis in axes]
        rest = [place for place in range(len(order)) if place not in places]
        blocks = grid.transpose(*rest, *places).reshape(-1, _size(sizes, axes))
        expected = sorted(map(tuple, blocks.tolist()))
        groups = meshes.memberships(sizes, axes)
        if sorted(groups) != expected:
            wrong = next(g for g in groups if g not in set(expected))
            raise Fault(f"group along {' x '.join(axes)}: ranks {wrong} are no block of the mesh")
        count += len(groups)
    for rank in range(grid.size):
        at = meshes.coordinates_of(rank, sizes)
        if grid[tuple(at[axis][0] for axis in order)] != rank:
            raise Fault(f"rank {rank} has the coordinates {at}")
    return {"groups": count, "steps of the schedule": check_schedule(config)}


def _size(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def check_schedule(config: RunConfig) -> int:
    """Simulate the messages of a step's schedule, in which a rank continues once its partners have
    posted the matching messages. Return the number of actions. Raises Fault on a deadlock, or if an
    action is missing or duplicated."""
    parallel = config.parallel
    rounds = config.training.micro_batch_size * parallel.data_parallel_size
    schedule = PipelineSchedule(
        parallel.pipeline_schedule,
        ranks=parallel.pipeline_model_parallel_size,
        chunks=parallel.num_virtual_stages_per_pipeline_rank,
        micro_batches=max(1, config.training.global_batch_size // rounds),
    )
    if schedule.ranks == 1:
        return 0
    plans = [work_plan(schedule, rank) for rank in range(schedule.ranks)]
    places = [0] * len(plans)
    done: set[tuple[bool, int, int]] = set()
    arrived: set[tuple[bool, int, int]] = set()
    posted: dict[int, Exchange] = {}
    actions, moved = 0, True
    parts: Counter[Any] = Counter()
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while places[rank] < len(plan):
                entry = plan[places[rank]]
                if isinstance(entry, Exchange):
                    posted[rank] = entry
                    if not _matched(entry, posted, arrived):
                        break
                else:
                    _check_ready(schedule, rank, entry, done, arrived)
                    if entry.part != "weights":
                        key = (entry.backward, entry.stage, entry.micro_batch)
                        if key in done:
                            raise Fault(f"pipeline rank {rank} runs {entry} twice")
                        done.add(key)
                    actions += 1
                    parts[entry.part, entry.stage, entry.micro_batch] += 1
                places[rank] += 1
                moved = True
    for rank, plan in enumerate(plans):
        if places[rank] < len(plan):
            raise Fault(f"pipeline rank {rank} waits indefinitely in {plan[places[rank]]}")
    for (part, stage, batch), count in parts.items():
        halves = (count, parts["inputs", stage, batch], parts["weights", stage, batch])
        if part and halves != (1, 1, 1):
            raise Fault(f"stage {stage}, micro batch {batch}: not one pass for inputs and weights")
    expected = set(product((False, True), range(schedule.stages), range(schedule.micro_batches)))
    if done != expected:
        raise Fault(f"the schedule has no pass for {min(expected - done)} (backward, stage, batch)")
    return actions


def _matched(
    exchange: Exchange,
    posted: Mapping[int, Exchange],
    arrived: set[tuple[bool, int, int]],
) -> bool:
    """Return whether an exchange's partners have posted the matching messages."""
    for each in exchange.receives:
        key = (each.gradient, each.to_stage, each.micro_batch)
        theirs = posted.get(each.source)
        if key not in arrived and (theirs is None or each not in theirs.sends):
            return False
    for each in exchange.sends:
        key = (each.gradient, each.to_stage, each.micro_batch)
        theirs = posted.get(each.target)
        if key not in arrived and (theirs is None or each not in theirs.receives):
            return False
    arrived.update((e.gradient, e.to_stage, e.micro_batch) for e in exchange.receives)
    arrived.update((e.gradient, e.to_stage, e.micro_batch) for e in exchange.sends)
    return True


def _check_ready(
    schedule: PipelineSchedule,
    rank: int,
    action: Any,
    done: set[tuple[bool, int, int]],
    arrived: set[tuple[bool, int, int]],
) -> None:
    """Check that an action's input is available. Raises Fault if it is not."""
    if schedule.rank_of(action.stage) != rank:
        raise Fault(f"pipeline rank {rank} runs {action}, whose stage is another rank's")
    if action.part == "weights":
        needed, own = (True, action.stage, action.micro_batch), True
    else:
        step = 1 if action.backward else -1
        before = action.stage + step
        if not 0 <= before < schedule.stages:
            if action.backward and (False, action.stage, action.micro_batch) not in done:
                raise Fault(f"pipeline rank {rank} runs {action} before its forward pass")
            return
        own = schedule.rank_of(before) == rank
        needed = (action.backward, before if own else action.stage, action.micro_batch)
    if needed not in (done if own else arrived):
        raise Fault(f"pipeline rank {rank} runs {action} before what it needs has arrived")


def check_shares(run: Run) -> dict[str, Any]:
    """Check that the shards of every parameter cover it exactly once, apart from copies. Layers
    with equal shards are of one kind. All layers are checked on the first and the last rank, and
    one layer of each kind on the others. Raises Fault for the first parameter that differs."""
    config, sizes = run.config, axes_of(run.config)
    spec = trained_spec(config)
    with torch.device("meta"):
        whole = {layer.name: _shards(layer) for layer in spec.layers(TensorParallel())}
    kinds: dict[tuple[Any, ...], str] = {}
    for name, shards in whole.items():
        kinds.setdefault((*shards.items(),), name)
    places = [
        {axis: (place, sizes[axis]) for axis, place in zip(AXES, (0, 0, 0, e, t), strict=True)}
        for e in range(sizes["expert"])
        for t in range(sizes["tensor"])
    ]
    pieces: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    shapes: dict[tuple[str, str], Shard] = {}
    for at in places:
        names = None if at in (places[0], places[-1]) else set(kinds.values())
        for name, shards in _layers_at(config, spec, at, sizes, names).items():
            expected = {key.split("|")[0]: s.canonical_shape for key, s in whole[name].items()}
            for key, shard in shards.items():
                base = key.split("|")[0]
                if expected.get(base) != shard.canonical_shape:
                    raise Fault(
                        f"{name}.{base} is {shard.canonical_shape} in this layout and "
                        f"{expected.get(base)} on one process"
                    )
                shapes[name, key] = shard
                if name in kinds.values() and shard.counted(at, ("expert", "tensor")):
                    numel = math.prod(shard.local_shape(at))
                    pieces[name, key].append(Slice.of(shard, at, 0, numel))
    for name in kinds.values():
        for base in {key.split("|")[0] for key in whole[name]}:
            keys = [key for of, key in shapes if of == name and key.split("|")[0] == base]
            _check_cover(name, base, [(shapes[name, key], pieces[name, key]) for key in keys])
    total = sum(math.prod(s.canonical_shape) for of in whole.values() for s in of.values())
    return {"parameters' elements": total, "kinds of layers": len(kinds)}


def _check_cover(name: str, base: str, parts: Sequence[tuple[Shard, Sequence[Slice]]]) -> None:
    """Check that the slices of a parameter cover each element once. Raises Fault if they do not."""
    shape = parts[0][0].canonical_shape
    total = sum(piece.numel for _, pieces in parts for piece in pieces)
    if len(parts) == 1:
        right = tiles(shape, [piece for piece in parts[0][1] if piece.numel])
    else:
        every = [piece for _, pieces in parts for piece in pieces]
        right = total == math.prod(shape) and not any(
            one.overlap(other) is not None
            for place, one in enumerate(every)
            for other in every[:place]
        )
    if not right:
        raise Fault(
            f"shares of {name}.{base}: the ranks have {total:,} of its {math.prod(shape):,} "
            "elements, or some of them twice"
        )


def _shards(layer: LayerSpec) -> dict[str, Shard]:
    """Return the shards of a layer's parameters, keyed by "name|part"."""
    shards = {}
    module: nn.Module = layer.build()
    for name, param in module.named_parameters():
        shard = shard_of(param)
        if shard.whole is not None:
            name = f"{name.rpartition('.')[0]}.{shard.whole}".lstrip(".")
        shards[f"{name}|{shard.part}"] = shard
    return shards


def _layers_at(
    config: RunConfig,
    spec: Any,
    at: Mapping[str, tuple[int, int]],
    sizes: Mapping[str, int],
    names: set[str] | None,
) -> dict[str, dict[str, Shard]]:
    """Return the shards of the layers ``names`` (None for all) on the rank at coordinates ``at``.
    The groups have no handles for communication."""
    rank = 0
    for axis in AXES:
        rank = rank * sizes[axis] + at[axis][0]
    mesh = Mesh(Group(tuple(range(math.prod(sizes.values()))), rank), sizes, groups_of(sizes, rank))
    tensor = TensorParallel.of(mesh, config.parallel)
    with torch.device("meta"):
        layers = spec.layers(tensor)
        return {each.name: _shards(each) for each in layers if names is None or each.name in names}


def groups_of(sizes: Mapping[str, int], rank: int) -> dict[tuple[str, ...], Group]:
    """Return a rank's groups along every combination of axes."""
    groups = {}
    for axes in meshes._COMBINATIONS:
        wide = meshes._wide(axes, sizes)
        for ranks in meshes.memberships(sizes, wide):
            if rank in ranks:
                groups[wide] = Group(ranks, ranks.index(rank))
    return groups
