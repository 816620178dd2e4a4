"""Reads and writes an engine's state as float32 slices of canonical parameters and their moments,
each owned by this rank. Only this file knows where DeepSpeed stores them at each ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoint.manifest import KEPT_COUNTS
from megatron.checkpoint.slices import Slice
from megatron.config.optimizer import STATES
from megatron.engine.deepspeed_patches import partition_range, set_partition
from megatron.engine.train_engine import ModelEngine, TrainEngine
from megatron.engine.update.adam import Partition
from megatron.parallel.shard import shard_of

_SCALER_NUMBERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


TRAINED = "trained_weight"
"""Name of the weights that training uses, if ``weight`` holds different ones for all other uses."""


@dataclass(frozen=True)
class OwnedSlice:
    """Slice of a parameter that this rank's optimizer updates.

    Attributes:
        count: number of elements in the slice, including the padding that follows it.
        moments: names of the optimizer's states; empty before the first step.
    """

    param: nn.Parameter
    name: str
    slice: Slice
    count: int
    moments: tuple[str, ...]
    _start: int
    _states: Partition
    _holder: Tensor
    _kept: Mapping[str, Tensor]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of all tensors of the slice: ``weight``, the moments and the kept states."""
        return "weight", *self.moments, *self._kept

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the states in :attr:`TrainEngine.kept` that exist."""
        return tuple(self._kept)

    @property
    def trained(self) -> str:
        """Name of the weights that the model computes with in training."""
        return TRAINED if TRAINED in self.moments else "weight"

    def get(self, kind: str) -> Tensor:
        """Return the float32 values of a tensor in :attr:`kinds`, flat and followed by padding.
        They are a view of the engine's state if that is float32, otherwise a copy."""
        if kind in self._kept:
            return self._kept[kind].view(-1).narrow(0, self._start, self.count)
        return self._states.get(kind, self._start, self.count)

    def set(self, kind: str, values: Tensor) -> None:
        """Write values in the same form as :meth:`get` returns them."""
        if kind in self._kept:
            self.get(kind).copy_(values)
        else:
            self._states.set(kind, self._start, values)

    def of_holder(self, values: Tensor) -> Tensor:
        """Return this slice of ``values``, a tensor with the size of :attr:`holder`, unpadded."""
        return values.view(-1).narrow(0, self._start, self.slice.numel)

    @property
    def holder(self) -> Tensor:
        """Tensor that the optimizer updates, which may contain several slices."""
        return self._holder


class Float32Partition:
    """Partition whose main weights and optimizer states are float32 tensors; accessed as views."""

    def __init__(self, main: Tensor, state: Mapping[str, Tensor]) -> None:
        self._tensors = {**state, "weight": main.data}

    def has(self, kind: str) -> bool:
        """Return whether this state exists. Moments do not exist before the first update."""
        return self._tensors.get(kind) is not None

    def get(self, kind: str, start: int, count: int) -> Tensor:
        return self._tensors[kind].view(-1).narrow(0, start, count)

    def set(self, kind: str, start: int, values: Tensor) -> None:
        self.get(kind, start, values.numel()).copy_(values)


def owned_slices(engine: TrainEngine) -> Iterator[OwnedSlice]:
    """Yield the slices that this rank owns, in parameter order. At stage 0 they are whole
    parameters, and every data-parallel rank has the same values."""
    place_of, form = places(engine), engine.stored_states
    partitions: dict[Tensor, Partition] = {}
    for param, name in engine.trained.items():
        start, holder, offset, count = place_of(param)
        if count > 0:
            if holder not in partitions:
                state = engine.optimizer.state.get(holder, {})
                make = form.partition if form is not None else engine.view or Float32Partition
                partitions[holder] = make(holder, state)
            states = partitions[holder]
            moments = tuple(filter(states.has, STATES[engine.config.optimizer.optimizer]))
            held = Slice.of(shard_of(param), engine.mesh.coordinates, start, start + count)
            kept = {kind: of.tensors[holder] for kind, of in engine.kept.items() if of.tensors}
            yield OwnedSlice(param, name, held, count, moments, offset, states, holder, kept)


_PlaceOf = Callable[[nn.Parameter], tuple[int, Tensor, int, int]]
"""Function that maps a parameter to the start of this rank's range in it, the tensor that the
optimizer updates, the range's start in that tensor, and its length (below 1 if it is empty)."""


def places(engine: TrainEngine) -> _PlaceOf:
    """Return a function that locates this rank's range of a parameter."""
    find = {0: _whole, 1: _flat_partition, 2: _flat_partition, 3: _own_partition}[engine.stage]
    return find(engine)


def _whole(engine: TrainEngine) -> _PlaceOf:
    mains = _unpartitioned_main_weights(engine)
    return lambda param: (0, mains.get(param, param), 0, param.numel())


def _unpartitioned_main_weights(engine: TrainEngine) -> Mapping[nn.Parameter, Tensor]:
    """Return the main weights of fp16 at stage 0, by parameter; empty in all other cases."""
    return getattr(engine.optimizer_wrapper, "main_weights", {})


def has_main_weights(engine: TrainEngine) -> bool:
    """Return whether the optimizer updates main weights, of which the model has rounded copies."""
    separate = engine.stage > 0 or bool(_unpartitioned_main_weights(engine))
    return separate and engine.stored_states is None


def _flat_partition(engine: TrainEngine) -> _PlaceOf:
    wrapper = engine.optimizer_wrapper
    # DeepSpeed's own mapping from parameters to partitions (_hp_mapping) ignores the order of
    # round_robin_gradients.
    groups = wrapper.round_robin_bit16_groups
    # DeepSpeed 0.19.0 stores no offsets, as its parameters are contiguous.
    offsets = getattr(wrapper, "round_robin_bit16_offsets", None) or [
        list(accumulate((p.numel() for p in params), initial=0)) for params in groups
    ]
    places = {
        param: (group, offset)
        for group, params in enumerate(groups)
        for param, offset in zip(params, offsets[group], strict=False)
    }
    flat = holders(engine)

    def place_of(param: nn.Parameter) -> tuple[int, Tensor, int, int]:
        group, offset = places[param]
        holder = flat[group]
        rank = engine.mesh.replicas(shard_of(param)).rank
        first = rank * holder.numel() - offset
        start, end = max(0, first), min(param.numel(), first + holder.numel())
        return start, holder, start - first, end - start

    return place_of


def _own_partition(engine: TrainEngine) -> _PlaceOf:
    wrapper = engine.optimizer_wrapper

    def place_of(param: nn.Parameter) -> tuple[int, Tensor, int, int]:
        start, end = partition_range(param, engine.mesh.replicas(shard_of(param)))
        group, offset, _ = wrapper.grad_position[wrapper.get_param_id(param)]
        return start, wrapper.fp32_partitioned_groups_flat[group], offset, end - start

    return place_of


def holders(engine: TrainEngine) -> list[Tensor]:
    """Return the tensors that the wrapped optimizer updates and has states for."""
    if engine.stage == 0:
        mains = _unpartitioned_main_weights(engine)
        return [mains.get(param, param) for param in engine.trained]
    wrapper = engine.optimizer_wrapper
    if engine.stage == 3:
        return list(wrapper.fp32_partitioned_groups_flat)
    return list(wrapper.single_partition_of_fp32_groups)


def owned_gradients(engine: TrainEngine) -> Iterator[tuple[OwnedSlice, Tensor]]:
    """Yield the slices that this rank owns, each with its gradient, flat and without padding. Call
    it after :meth:`Backend.accumulate` and before the update: gradients are averaged over the
    replicas, but neither clipped nor divided by the loss scale."""
    wrapper, slices = engine.optimizer_wrapper, list(owned_slices(engine))
    offloaded = getattr(wrapper, "cpu_offload", False) or getattr(
        wrapper, "offload_optimizer", False
    )
    if offloaded:
        for piece in slices:
            if piece.holder.grad is not None:
                yield piece, piece.of_holder(piece.holder.grad)
        return
    gradient_of = _gradient_of(engine)
    for piece in slices:
        grad = gradient_of(piece.param)
        if grad is not None:
            yield piece, grad.reshape(-1)[: piece.slice.numel]


def gradients_of(engine: TrainEngine, params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's shards of the gradients of these parameters, in their order, as in
    :func:`owned_gradients`. Unpartitioned gradients are whole. Offloading is not supported."""
    grads = map(_gradient_of(engine), params)
    return [grad for grad in grads if grad is not None]


def _gradient_of(engine: TrainEngine) -> Callable[[nn.Parameter], Tensor | None]:
    """Return a function that finds this rank's shard of a parameter's gradient."""
    wrapper = engine.optimizer_wrapper
    if _unpartitioned_main_weights(engine):
        return wrapper.get_gradient_for_reduction  # type: ignore[no-any-return]
    if engine.stage == 0:
        return lambda param: param.grad
    grads: dict[nn.Parameter, Tensor] = {}
    groups = wrapper.fp16_groups if engine.stage == 3 else wrapper.params_in_partition
    for number, params in enumerate(groups):
        of_group = wrapper.averaged_gradients[number]
        kept = (grad for grad in of_group if not getattr(grad, "_zero_padding", False))
        grads |= zip(params, kept, strict=False)
    return grads.get


def optimizer_step(engine: TrainEngine) -> int:
    """Return the number of Adam updates so far, or 0 for SGD, which does not count them."""
    for holder in holders(engine):
        step = engine.optimizer.state.get(holder, {}).get("step")
        if step is not None:
            return int(step)
    return 0


def create_moments(engine: TrainEngine, step: int) -> None:
    """Create optimizer states of zeros, as after ``step`` updates, or reset existing states."""
    name = engine.config.optimizer.optimizer
    ruled = _creators(engine)
    for holder in holders(engine):
        state = engine.optimizer.state[holder]
        if engine.stored_states is not None:
            state.update(engine.stored_states.create(holder))
        elif holder in ruled:
            state.update(ruled[holder](holder.detach()))
        else:
            for moment in STATES[name]:
                values = state.get(moment)
                if values is None:
                    values = torch.empty_like(holder, memory_format=torch.preserve_format)
                state[moment] = values.zero_()
        if name != "sgd":
            # The fused kernel requires the count on the weights' device.
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=holder.device)


def _creators(engine: TrainEngine) -> dict[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
    """Return the function that creates each updated tensor's states; empty if all are alike."""
    place_of = places(engine)
    creators = getattr(engine.optimizer, "creators", {})
    return {place_of(param)[1]: create for param, create in creators.items()}


def more_states(engine: TrainEngine) -> Mapping[str, Tensor]:
    """Return the optimizer states that this rank saves as whole tensors, by name. Collective."""
    states: Mapping[str, Tensor] = getattr(engine.optimizer, "more_states", dict)()
    return states


def kept_counts(engine: TrainEngine) -> dict[str, Any]:
    """Return the update counts of the kept states, as an entry for a checkpoint's state, or {}."""
    counts = {kind: int(kept.count) for kind, kept in engine.kept.items()}
    return {KEPT_COUNTS: counts} if counts else {}


@torch.no_grad()
def set_working_weights(
    engine: ModelEngine,
    values: Callable[[nn.Parameter, int, int], Tensor],
    but: Collection[nn.Parameter] = (),
) -> None:
    """Set the weights that the model computes with, in their own dtype, except parameters in
    ``but``. ``values`` returns elements [start, end) of this tensor-parallel rank's shard, flat."""
    form = engine.stored_states
    for param in engine.names:
        if param in but:
            continue
        if engine.stage < 3:
            whole = values(param, 0, param.numel())
            if form is not None and param in engine.trained:
                whole = form.model_weights(whole)
            param.data.copy_(whole.view_as(param))
        else:
            start, end = partition_range(param, engine.mesh.replicas(shard_of(param)))
            set_partition(param, values(param, start, end))


@torch.no_grad()
def set_trained_weights(
    engine: TrainEngine,
    values: Callable[[OwnedSlice], Tensor],
    only: Mapping[nn.Parameter, object] | None = None,
) -> None:
    """Set the weights that the model computes with. ``values`` returns the flat elements of a
    slice, and is called on the rank that owns it. ``only`` limits the change to its keys, by
    default all trained parameters. Collective: every rank must call this, between steps."""
    owned = {own.param: own for own in owned_slices(engine)}

    def of_share(param: nn.Parameter, start: int, end: int) -> Tensor:
        dtype = torch.promote_types(param.dtype, torch.float32)
        flat, own = param.new_zeros(end - start, dtype=dtype), owned.get(param)
        if own is not None:
            first, count = own.slice.start - start, own.slice.numel
            flat[first : first + count] = values(own)[:count]
        ranks = engine.mesh.replicas(shard_of(param))
        if 0 < engine.stage < 3 and ranks.size > 1:
            dist.all_reduce(flat, group=ranks.handle)
        return flat

    changed = engine.trained if only is None else only
    with engine.replacing_state():
        set_working_weights(engine, of_share, but=engine.names.keys() - changed.keys())
    engine.kernels.invalidate()


def loss_scaler_state(engine: TrainEngine) -> dict[str, Any]:
    """Return the state of the dynamic loss scaler, or {} without a dynamic scaler."""
    scaler = _dynamic_scaler(engine)
    return {} if scaler is None else {key: getattr(scaler, key) for key in _SCALER_NUMBERS}


def set_loss_scaler_state(engine: TrainEngine, state: dict[str, Any]) -> None:
    """Restore the result of :func:`loss_scaler_state`, unless either run has no dynamic scaler."""
    scaler = _dynamic_scaler(engine)
    if scaler is not None and state.keys() == set(_SCALER_NUMBERS):
        for key, value in state.items():
            setattr(scaler, key, value)


def _dynamic_scaler(engine: TrainEngine) -> Any:
    """Return the loss scaler if it is dynamic, else None. Without fp16 its scale is always 1."""
    scaler = getattr(engine.optimizer_wrapper, "loss_scaler", None)
    return scaler if getattr(scaler, "dynamic", False) else None
