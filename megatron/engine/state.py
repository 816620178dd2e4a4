"""The engine's state as fragments: which part of which parameter and moment this rank owns.

DeepSpeed keeps float32 weights and moments differently at every ZeRO stage; everything above this
file sees only flat ranges of canonical parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.engine.train_engine import TrainEngine, partition_range
from megatron.parallel.shard import Shard, shard_of

MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""Names of the optimizer's state tensors, as torch.optim calls them."""


@dataclass(frozen=True)
class Fragment:
    """A flat range of one parameter's local share, with its float32 weights and moments.

    Attributes:
        name: canonical name of the parameter.
        shard: how the parameter is cut over tensor-parallel ranks.
        start: where the range starts in the flattened local share.
        weight: float32 values, flat; writing to it changes the engine's state.
        moments: optimizer state, flat, by name; empty before the first step.
    """

    name: str
    shard: Shard
    start: int
    weight: Tensor
    moments: dict[str, Tensor]


def fragments(engine: TrainEngine) -> Iterator[Fragment]:
    """The fragments that this rank owns, in parameter order.

    At stage 0 every data-parallel rank owns whole parameters, all of them equal.
    """
    read = {0: _whole, 1: _flat_partition, 2: _flat_partition, 3: _own_partition}[engine.stage]
    for param, name in engine.names.items():
        found = read(engine, param)
        if found is not None:
            start, weight, moments = found
            yield Fragment(name, shard_of(param), start, weight, moments)


_Found = tuple[int, Tensor, dict[str, Tensor]]


def _moments(engine: TrainEngine, holder: Tensor, start: int, count: int) -> dict[str, Tensor]:
    state = engine.optimizer.state.get(holder, {})
    return {
        name: state[name].view(-1).narrow(0, start, count)
        for name in MOMENTS[engine.config.optimizer.optimizer]
        if state.get(name) is not None
    }


def _whole(engine: TrainEngine, param: nn.Parameter) -> _Found:
    flat = param.data.view(-1)
    return 0, flat, _moments(engine, param, 0, flat.numel())


def _flat_partition(engine: TrainEngine, param: nn.Parameter) -> _Found | None:
    mapping = param._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return None
    place = mapping.get_hp_fragment_address()
    partitions = engine.optimizer_wrapper.single_partition_of_fp32_groups
    holder = partitions[mapping.param_group_index]
    moments = _moments(engine, holder, place.start, place.numel)
    return mapping.lp_fragment_address.start, mapping.hp_fragment, moments


def _own_partition(engine: TrainEngine, param: nn.Parameter) -> _Found | None:
    wrapper = engine.optimizer_wrapper
    start, end = partition_range(param, engine.groups.data)
    if start == end:
        return None
    group, offset, _ = wrapper.grad_position[wrapper.get_param_id(param)]
    holder = wrapper.fp32_partitioned_groups_flat[group]
    count = end - start
    weight = holder.data.narrow(0, offset, count)
    return start, weight, _moments(engine, holder, offset, count)


def holders(engine: TrainEngine) -> list[Tensor]:
    """The tensors that the wrapped optimizer has its state for."""
    if engine.stage == 0:
        return list(engine.names)
    if engine.stage == 3:
        return list(engine.optimizer_wrapper.fp32_partitioned_groups_flat)
    return list(engine.optimizer_wrapper.single_partition_of_fp32_groups)


def optimizer_step(engine: TrainEngine) -> int:
    """How many updates the optimizer has made."""
    for holder in holders(engine):
        step = engine.optimizer.state.get(holder, {}).get("step")
        if step is not None:
            return int(step)
    return 0


def create_moments(engine: TrainEngine, step: int) -> None:
    """Creates optimizer state, all zero, as it is after ``step`` updates, to be filled."""
    name = engine.config.optimizer.optimizer
    for holder in holders(engine):
        state = engine.optimizer.state[holder]
        for moment in MOMENTS[name]:
            state[moment] = torch.zeros_like(holder, memory_format=torch.preserve_format)
        if name == "adam":
            fused = engine.optimizer.defaults.get("fused")
            device = holder.device if fused else torch.device("cpu")
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)


@torch.no_grad()
def set_working_weights(engine: TrainEngine, whole: Callable[[str, Shard], Tensor]) -> None:
    """Sets the weights that the model computes with, in their own number format.

    Args:
        whole: gives this tensor-parallel rank's share of a parameter, at its local shape.
    """
    for param, name in engine.names.items():
        values = whole(name, shard_of(param))
        if engine.stage < 3:
            param.data.copy_(values)
        else:
            start, end = partition_range(param, engine.groups.data)
            own = param.ds_tensor.data  # type: ignore[attr-defined]
            own[: end - start].copy_(values.reshape(-1)[start:end])


def loss_scaler_state(engine: TrainEngine) -> dict[str, Any]:
    """The dynamic loss scaler's numbers; empty without one."""
    scaler = getattr(engine.optimizer_wrapper, "loss_scaler", None)
    return {
        key: getattr(scaler, key)
        for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        if hasattr(scaler, key)
    }


def set_loss_scaler_state(engine: TrainEngine, state: dict[str, Any]) -> None:
    """The inverse of :func:`loss_scaler_state`."""
    scaler = getattr(engine.optimizer_wrapper, "loss_scaler", None)
    for key, value in state.items():
        if hasattr(scaler, key):
            setattr(scaler, key, value)
