"""A model as its family describes it to what trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerSpec
from megatron.model.state import LayerState
from megatron.parallel.tensor_parallel import TensorParallel


class Batch(Protocol):
    """A micro batch that can move to a device."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """The batch on ``device``."""
        ...


Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True)
class Measure:
    """Numbers that an evaluation takes of every micro batch.

    What is reported are their means over micro batches and data ranks. A quotient of two of them is
    that of their sums: accuracy is the quotient of ``correct`` and ``counted``.

    Attributes:
        names: of the numbers; every rank knows them, also those that have none to give.
        take: scalars by name, of the state after the last layer and the batch that it is of. The
            tensor-parallel ranks must find the same.
        logits: whether the last layer is asked for logits, ``hidden`` of the state, in place of
            losses.
    """

    names: tuple[str, ...]
    take: Callable[[LayerState, Any], Mapping[str, Tensor]]
    logits: bool = False

    def asked(self, begin: LayerState) -> LayerState:
        """The state that a micro batch starts with, for what the last layer is to give."""
        return begin._replace(targets=None) if self.logits else begin

    def of(self, state: LayerState, batch: Any) -> Tensor:
        """The numbers of a micro batch in order, float64 [N]."""
        found = self.take(state, batch)
        assert found.keys() == set(self.names), f"{list(found)} instead of {list(self.names)}"
        return torch.stack([found[name].detach().double() for name in self.names])


def hidden_travels(
    hidden_size: int, state: LayerState, tp: TensorParallel, place: int
) -> dict[str, tuple[int, ...]]:
    """What crosses a boundary in a family in which hidden states alone do: [B, S / slices, H]."""
    samples, length = state.hidden.shape
    assert length % tp.slices == 0
    return {"hidden": (samples, length // tp.slices, hidden_size)}


@dataclass(frozen=True)
class ModelSpec:
    """A model as a layer list, and what to do with its batches.

    Attributes:
        layers: the layers, cut over tensor-parallel ranks.
        begin: the state that a micro batch starts with: token ids as ``hidden``, positions, masks,
            targets. Every pipeline stage has its own, and replaces in it what travels.
        travels: what crosses the boundary in front of a place of the layer list: of the beginning
            state, the tensor-parallel ranks and the place, shapes by name: ``hidden``, ``encoder``,
            or that of a loss that was added before.
        losses: name of each loss that the state has after the last layer, and its weight in the
            number that is minimised; in the order of logging.
    """

    layers: Callable[[TensorParallel], list[LayerSpec]]
    begin: Callable[[Any], LayerState]
    travels: Callable[[LayerState, TensorParallel, int], Mapping[str, Sequence[int]]]
    losses: Mapping[str, float] = field(default_factory=lambda: {LM_LOSS: 1.0})

    def total(self, losses: Mapping[str, Number]) -> Number:
        """The number that is minimised."""
        weighted = (
            losses[name] if weight == 1.0 else weight * losses[name]
            for name, weight in self.losses.items()
        )
        return reduce(add, weighted)

    @property
    def loss_measure(self) -> Measure:
        """The losses, as an evaluation takes them."""
        return Measure(tuple(self.losses), lambda state, _: state.losses)
