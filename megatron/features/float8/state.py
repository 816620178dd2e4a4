"""State of 8-bit linear layers that persists between optimizer steps: their weights in 8 bits, cast
once per update, and with ``--fp8-recipe delayed`` the amax history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.features.float8.flags import Float8Flags
from megatron.features.float8.linear import NOTHING_KEPT, Float8, Kept
from megatron.parallel.layers import ParallelLinear
from megatron.parallel.linear import KernelStates
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of


@dataclass(frozen=True)
class _Place:
    """A weight, its layer, and the layer's attribute that holds the weight's :class:`Kept`
    state."""

    key: str
    layer: ParallelLinear
    weight: nn.Parameter
    attribute: str
    float8: Float8

    @property
    def kept(self) -> Kept:
        return getattr(self.layer, self.attribute) or NOTHING_KEPT

    def keep(self, **changes: Any) -> None:
        setattr(self.layer, self.attribute, self.kept._replace(**changes))


class Float8State(KernelStates):
    """State of a process's 8-bit layers. If there are no such layers, every method does nothing.

    Args:
        blocks: blocks whose linear layers may compute in 8 bits.
        names: canonical name of each parameter.
        partitioned: True if the weights are partitioned across processes (ZeRO stage 3). They are
            then cast at every use.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        names: Mapping[nn.Parameter, str],
        fast: Float8Flags,
        mesh: Mesh,
        partitioned: bool,
    ) -> None:
        self._places = {block: list(_places(block, names)) for block in blocks}
        self._keeps_weights = not partitioned
        self._stale = set(blocks)
        places = list(chain.from_iterable(self._places.values()))
        delayed = bool(places) and fast.fp8_recipe == "delayed"
        self.history = AmaxHistory(places, fast, mesh) if delayed else None
        self.file = "float8" if delayed else None

    def refresh(self) -> None:
        """Cast the weights again if they have changed."""
        for block in self._places:
            self.refresh_layer(block)

    @torch.no_grad()
    def refresh_layer(self, layer: nn.Module) -> None:
        if layer not in self._stale or not self._keeps_weights:
            return
        for place in self._places[layer]:
            rows, kept = place.float8.weight_rows(place.weight, NOTHING_KEPT), place.kept
            if kept.weight is None:
                place.keep(weight=rows)
                continue
            # Update in place: CUDA graphs read fixed addresses.
            for target, values in zip(kept.weight, rows, strict=True):
                target.copy_(values)
        self._stale.discard(layer)

    def invalidate(self) -> None:
        self._stale.update(self._places)

    def forget_step(self) -> None:
        if self.history is not None:
            self.history.forget_step()

    def end_step(self) -> None:
        self.invalidate()
        if self.history is not None:
            self.history.roll()

    def state(self) -> dict[str, Tensor]:
        return {} if self.history is None else self.history.state()

    def load(self, state: Mapping[str, Tensor], folder: Path) -> str | None:
        if self.history is None or self.history.load(state):
            return None
        return (
            f"--fp8-recipe delayed: {folder} has no history of the largest values; the first step "
            "is scaled by its own"
        )


class AmaxHistory:
    """Amax history: the amax of the input and output gradient of every 8-bit layer in the last
    ``--fp8-amax-history-len`` steps, over all micro batches and all ranks that share the layer. The
    backward pass returns them as a gradient, so that evaluation and recomputed activations do not
    affect the history.

    Until a step has been measured, current values set the scales. An amax that is zero or not
    finite is replaced by that of the previous step.
    """

    def __init__(self, places: Sequence[_Place], fast: Float8Flags, mesh: Mesh) -> None:
        self._places, self._mesh = places, mesh
        self._most_recent = fast.fp8_amax_compute_algo == "most_recent"
        self._margin = 2.0**fast.fp8_margin
        count, device = len(places), places[0].weight.device
        self._history = torch.zeros(fast.fp8_amax_history_len, count, 2, device=device)
        self._current = torch.zeros(count, 2, device=device)
        self._leaves = [torch.ones(2, device=device, requires_grad=True) for _ in places]
        self.measured = False
        for place, leaf, current in zip(places, self._leaves, self._current, strict=True):
            leaf.register_post_accumulate_grad_hook(_Recorder(current))
            place.keep(largest=leaf)

    @torch.no_grad()
    def roll(self) -> None:
        """Add a step's amax values to the history, and set the scales of the next step."""
        current = torch.where(self._current.isfinite(), self._current, 0.0)
        for group in (self._mesh.dense, self._mesh.tensor):
            if group.size > 1:
                dist.all_reduce(current, dist.ReduceOp.MAX, group=group.handle)
        newest = torch.where(current > 0, current, self._history[0])
        self._history = torch.cat([newest.unsqueeze(0), self._history[:-1]])
        self._current.zero_()
        self._choose()

    def forget_step(self) -> None:
        """Discard the amax values of a step that will be repeated."""
        self._current.zero_()

    def _choose(self) -> None:
        newest, most = self._history[0], self._history.amax(0)
        largest = (newest if self._most_recent else most) * self._margin
        # An amax that has always been zero gives the factor 1.
        largest = torch.where(largest > 0, largest, torch.finfo(torch.float8_e4m3fn).max)
        torch._foreach_copy_(self._leaves, list(largest))
        if not self.measured:
            self.measured = True
            for place in self._places:
                place.keep(measured=True)

    def state(self) -> dict[str, Tensor]:
        """Return the history by weight name, float32 [steps, 2], newest first. Empty at the
        start."""
        if not self.measured:
            return {}
        return {place.key: self._history[:, n] for n, place in enumerate(self._places)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> bool:
        """Restore the history from a checkpoint of any layout and length. Return whether it covers
        every layer. If it does not, nothing changes."""
        # A weight that is sharded over more ranks than it has heads is stored in two parts.
        whole = {key.partition("/")[0]: values for key, values in state.items()} | dict(state)
        states = []
        for place in self._places:
            values = whole.get(place.key, whole.get(place.key.partition("/")[0]))
            if values is None:
                return False
            states.append(values)
        self._history.zero_()
        for n, values in enumerate(states):
            length = min(len(values), len(self._history))
            self._history[:length, n] = values[:length].to(self._history)
        self._choose()
        return True


class _Recorder:
    """Gradient hook that merges a micro batch's amax values into those of the step."""

    def __init__(self, current: Tensor) -> None:
        self._current = current

    @torch.no_grad()
    def __call__(self, largest: Tensor) -> None:
        assert largest.grad is not None
        torch.maximum(self._current, largest.grad, out=self._current)
        largest.grad = None


def _places(block: nn.Module, names: Mapping[nn.Parameter, str]) -> Iterator[_Place]:
    for layer in block.modules():
        if not isinstance(layer, ParallelLinear) or not isinstance(layer.kernel, Float8):
            continue
        for name, weight in layer.named_parameters(recurse=False):
            if hasattr(layer, f"{name}_kept"):
                part = shard_of(weight).part
                key = f"{names[weight]}/{part}" if part else names[weight]
                yield _Place(key, layer, weight, f"{name}_kept", layer.kernel)
