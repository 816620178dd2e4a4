"""A model as its family describes it for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.model.attention_masks import AttentionKind
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.parallel.tensor_parallel import TensorParallel


class Batch(Protocol):
    """A micro batch that can move to a device."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...


Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True)
class Measure:
    """Numbers that an evaluation computes for every micro batch.

    Reported are their means over micro batches and data-parallel ranks, so that a ratio of two
    numbers is that of their sums: accuracy is ``correct`` / ``counted``.

    Attributes:
        take: scalars by name, from the state after the last layer and its batch; the same on all
            tensor-parallel ranks.
        logits: whether the last layer computes logits, ``hidden`` of the state, and not losses.
    """

    names: tuple[str, ...]
    take: Callable[[LayerState, Any], Mapping[str, Tensor]]
    logits: bool = False

    def start(self, begin: LayerState) -> LayerState:
        """The initial state of a micro batch from which the last layer computes what is needed."""
        return begin.changed(targets=None) if self.logits else begin

    def of(self, state: LayerState, batch: Any) -> Tensor:
        """The numbers of a micro batch, float64 [N]."""
        found = self.take(state, batch)
        assert found.keys() == set(self.names), f"{list(found)} instead of {list(self.names)}"
        return torch.stack([found[name].detach().double() for name in self.names])


def only_hidden_travels(
    hidden_size: int, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """`ModelSpec.travels` of one stack of blocks: hidden states [B, S / slices, H]."""
    samples, length = state.hidden.shape
    assert length % tp.slices == 0
    return {"hidden": (samples, length // tp.slices, hidden_size)}


@dataclass(frozen=True)
class ModelSpec:
    """A model as a layer list, with its inputs and losses.

    Attributes:
        begin: the initial state of a micro batch: token ids as ``hidden``, positions, masks,
            targets. Every pipeline stage makes its own and replaces in it what travels.
        travels: from the initial state, the tensor-parallel ranks and an index of the layer list:
            shapes by name of the tensors that a pipeline stage starting there receives (``hidden``,
            ``encoder``, or the name of a loss that was added before).
        losses: weight of each loss in the number that is minimised, in the order of logging.
        attention: the kind of most blocks, for what a run says about its kernels.
        head_parts: how the canonical names of parameters begin that belong to a head of such
            models, this one's or another: where only weights are loaded, the heads may differ.
    """

    layers: Callable[[TensorParallel], list[LayerSpec]]
    begin: Callable[[Any], LayerState]
    travels: Callable[[LayerState, TensorParallel, int], Mapping[str, Sequence[int]]]
    losses: Mapping[str, float] = field(default_factory=lambda: {LM_LOSS: 1.0})
    attention: AttentionKind = "causal"
    head_parts: tuple[str, ...] = ()

    def total(self, losses: Mapping[str, Number]) -> Number:
        weighted = (
            losses[name] if weight == 1.0 else weight * losses[name]
            for name, weight in self.losses.items()
        )
        return reduce(add, weighted)

    @property
    def loss_measure(self) -> Measure:
        return Measure(tuple(self.losses), lambda state, _: state.losses)
