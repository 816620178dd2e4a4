"""A model as its family describes it for training."""

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
from megatron.parallel.tensor_parallel import TensorParallel


class Batch(Protocol):
    """A micro batch that can move to a device."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...


Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True)
class Measure:
    """Numbers that an evaluation computes for every micro batch, or for each of its samples.

    Attributes:
        take: tensors by name, from the state after the last layer and its batch, the same on all
            tensor-parallel ranks: scalars, whose means over micro batches and data-parallel ranks
            are reported; with ``per_sample`` [B], or each [B, K].
        ends: what the last layer computes: losses; the scores of the targets, ``scores`` of the
            state; or logits, ``hidden`` of the state (``pooled``, where a head is on that).
        report: from the means by name to the numbers of an evaluation by name; not with
            ``per_sample``.
    """

    names: tuple[str, ...]
    take: Callable[[LayerState, Any], Mapping[str, Tensor]]
    ends: Literal["losses", "scores", "logits"] = "losses"
    per_sample: bool = False
    report: Callable[[Mapping[str, float]], dict[str, float]] = dict

    def start(self, begin: LayerState) -> LayerState:
        """The initial state of a micro batch from which the last layer computes what is needed."""
        if self.per_sample:
            begin = begin.changed(apart=True)
        if self.ends == "logits":
            return begin.changed(targets=None)
        if self.ends == "scores":
            assert begin.targets is not None
            return begin.changed(targets=begin.targets.changed(scored=True))
        return begin

    def of(self, state: LayerState, batch: Any) -> Tensor:
        """The numbers of a micro batch, float64: [N]; with ``per_sample`` [B, N] or [B, N, K]."""
        values = self.take(state, batch)
        assert values.keys() == set(self.names), f"{list(values)} instead of {list(self.names)}"
        numbers = [values[name].detach().double() for name in self.names]
        return torch.stack(numbers, dim=1 if self.per_sample else 0)


def _text_scores(state: LayerState, batch: Any) -> dict[str, Tensor]:
    assert state.scores is not None
    log_probs_BP, correct_BP = state.scores
    return {"log_prob": log_probs_BP.double().sum(1), "correct": correct_BP.sum(1)}


TEXT_SCORES = Measure(("log_prob", "correct"), _text_scores, ends="scores", per_sample=True)
"""For each sample the log-probability of its targets together, and how many of them are the token
that the model finds most probable."""


def _choice_scores(state: LayerState, batch: Any) -> dict[str, Tensor]:
    assert state.scores is not None
    log_probs_BP, correct_BP = state.scores
    # What ranks can divide may be more than there are.
    end, count = batch.positions_BP.shape[1], batch.choices_BK.shape[1]
    begin = end - count
    log_prob_B1 = log_probs_BP[:, :begin].double().sum(1, keepdim=True)
    correct_B1 = correct_BP[:, :begin].sum(1, keepdim=True)
    return {
        "log_prob": log_prob_B1 + log_probs_BP[:, begin:end],
        "correct": correct_B1 + correct_BP[:, begin:end],
    }


CHOICE_SCORES = Measure(("log_prob", "correct"), _choice_scores, ends="scores", per_sample=True)
"""Measure of :data:`TEXT_SCORES` for each choice of a sample's last token, [B, K]."""


def training_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of the weights that a run's model computes with."""
    if config.precision.bf16:
        return torch.bfloat16
    return torch.float16 if config.precision.fp16 else torch.float32


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
        losses: weight of each loss in the number that is minimised, in the order of logging; 0 for
            numbers that are only reported.
        attention: the kind of most blocks, for what a run says about its kernels.
        added_parts: words in the canonical names of the parameters that such models have beyond
            those of `Family.starts_from`.
        evaluated: what evaluations measure, if it is not the losses.
        head_parts: how the canonical names of parameters begin that belong to a head of such
            models, this one's or another: where only weights are loaded, the heads may differ.
        no_perplexity: names of losses, and of what is evaluated, that are no cross entropies.
        training_only: names of losses that are no part of the loss of an evaluation, which reports
            them next to it.
        widened: whether hidden states have at least 32 bits, whatever the dtype of the weights.
        draws: whether layers draw random numbers in training besides the model's own dropout.
        is_addition: tells the canonical names of parameters that a run adds to its base.
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
        """The model in which each rank of a context begins with its part of every sequence."""
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
