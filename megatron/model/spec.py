"""Description of a model by its family: layers, inputs, losses, and measures for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.model.attention_masks import AttentionKind
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.parallel.context import Context
from megatron.parallel.loss_head import Objective
from megatron.parallel.tensor_parallel import TensorParallel


class Batch(Protocol):
    """Micro batch that can be moved to a device."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...


Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True)
class Measure:
    """Numbers that an evaluation computes for every micro batch, or for each of its samples.

    Attributes:
        take: returns tensors by name, given the batch and the state after the last layer. They are
            the same on all tensor-parallel ranks. They are scalars, whose means over micro batches
            and data-parallel ranks are reported, or with ``per_sample`` all [B] or all [B, K].
        ends: result of the last layer: losses, or logits in the state's ``hidden`` (``pooled``, if
            the head uses that).
        objective: function that the head computes from the targets, instead of the model's losses,
            and adds to the state's ``losses``. Multi-token prediction is then off.
        report: maps the means by name to an evaluation's results by name. Not used with
            ``per_sample``.
    """

    names: tuple[str, ...]
    take: Callable[[LayerState, Any], Mapping[str, Tensor]]
    ends: Literal["losses", "logits"] = "losses"
    objective: Objective | None = None
    per_sample: bool = False
    report: Callable[[Mapping[str, float]], dict[str, float]] = dict

    def start(self, begin: LayerState) -> LayerState:
        """Return the initial state, changed so that the last layer computes the measure."""
        if self.per_sample:
            begin = begin.changed(apart=True)
        if self.ends == "logits":
            return begin.changed(targets=None)
        if self.objective is not None:
            return begin.changed(objective=self.objective, ahead=())
        return begin

    def of(self, state: LayerState, batch: Any) -> Tensor:
        """Return a micro batch's numbers, float64: [N]; [B, N] or [B, N, K] with ``per_sample``."""
        values = self.take(state, batch)
        assert values.keys() == set(self.names), f"{list(values)} instead of {list(self.names)}"
        numbers = [values[name].detach().double() for name in self.names]
        return torch.stack(numbers, dim=1 if self.per_sample else 0)


def training_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of the weights in a run's forward pass."""
    if config.precision.bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.fp16 else torch.float32


def only_hidden_travels(
    hidden_size: int, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """Return `ModelSpec.travels` for one stack of blocks: hidden states [B, S / slices, H]."""
    samples, length = state.hidden.shape
    assert length % tp.slices == 0
    return {"hidden": (samples, length // tp.slices, hidden_size)}


@dataclass(frozen=True)
class ModelSpec:
    """A model as a layer list, with its inputs and losses.

    Attributes:
        begin: returns the initial state of a micro batch: token ids as ``hidden``, positions,
            masks, targets. Every pipeline stage creates its own, and overwrites the fields that it
            receives.
        travels: returns the shapes, by name, of the tensors that a pipeline stage receives
            (``hidden``, ``encoder``, or the name of a loss added before), given the initial state,
            the tensor-parallel group, and the layer index at which the stage starts.
        losses: weight of each loss in the total that is minimised, in the order of logging; 0 for
            numbers that are only reported.
        attention: kind of attention in most blocks, for messages about kernels.
        added_parts: words in the canonical names of the parameters that such models have in
            addition to those of `Family.starts_from`.
        evaluated: measure that evaluations compute; None for the losses.
        head_parts: prefixes of the canonical names of parameters that belong to any head of such
            models. If only weights are loaded, the heads may differ.
        no_perplexity: names of losses and evaluated numbers that are not cross entropies.
        training_only: names of losses that an evaluation reports but does not add to its total.
        widened: whether hidden states have at least 32 bits, whatever the weights' dtype.
        draws: whether layers draw random numbers in training besides the model's own dropout.
        is_addition: returns whether the parameter with a canonical name is one that a run adds to
            its base model.
    """

    layers: Callable[[TensorParallel], list[LayerSpec]]
    begin: Callable[[Any], LayerState]
    travels: Callable[[LayerState, TensorParallel, int], Mapping[str, Sequence[int]]]
    losses: Mapping[str, float] = field(default_factory=lambda: {LM_LOSS: 1.0})
    attention: AttentionKind = "causal"
    head_parts: tuple[str, ...] = ()
    added_parts: frozenset[str] = frozenset()
    evaluated: Measure | None = None
    no_perplexity: frozenset[str] = frozenset()
    training_only: frozenset[str] = frozenset()
    widened: bool = False
    draws: bool = False
    is_addition: Callable[[str], bool] = lambda name: False

    def divided(self, context: Context) -> ModelSpec:
        """Return the model with ``begin`` changed to return a context-parallel rank's slice of each
        sequence."""
        if context.size == 1:
            return self
        return replace(self, begin=lambda batch: self.begin(batch).divided(context))

    def total(self, losses: Mapping[str, Number], but: Collection[str] = frozenset()) -> Number:
        weighted = (
            losses[name] if weight == 1.0 else weight * losses[name]
            for name, weight in self.losses.items()
            if weight and name not in but
        )
        return reduce(add, weighted)

    @property
    def loss_measure(self) -> Measure:
        return Measure(tuple(self.losses), lambda state, _: state.losses)
