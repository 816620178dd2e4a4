"""Loss of a student: cross entropy of the labels, plus divergence from its teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron.config import ConfigError, RunConfig
from megatron.features.distillation.divergence import (
    DistilledLosses,
    Distilling,
    TeacherHead,
    TopTokens,
    linear_distillation,
)
from megatron.features.distillation.flags import DistillationConfig
from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.loss_head import HeadInput

KD_LOSS, TOTAL_LOSS = "kd loss", "total loss"
"""Names of the divergence (times temperature^2) and of the minimised total."""


class TaughtBatch(NamedTuple):
    """Micro batch with a teacher's outputs.

    Attributes:
        batch: the family's batch.
        teacher: the outputs; None on pipeline stages without the output head, and after
            ``--kd-iters`` iterations.
    """

    batch: Any
    teacher: TeacherHead | TopTokens | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TaughtBatch:
        return self._replace(batch=self.batch.to(device, non_blocking=non_blocking))


def with_teacher(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the specification of a language model that can be trained on :class:`TaughtBatch`.
    The losses of other batches do not change. Raises ConfigError if the model does not predict
    tokens."""
    if LM_LOSS not in spec.losses:
        raise ConfigError(
            f"--kd: a model with {config.model.head_shown} has no probabilities of tokens, which a "
            "student learns; leave it out"
        )
    flags = config.section(DistillationConfig)
    terms = Distilling(flags.kd_alpha_ce, flags.kd_beta_ce, flags.kd_temp)
    others = {name: weight for name, weight in spec.losses.items() if name != LM_LOSS}
    losses = {LM_LOSS: 0.0, KD_LOSS: 0.0, **others, TOTAL_LOSS: spec.losses[LM_LOSS]}
    numbers = spec.no_perplexity | {KD_LOSS, TOTAL_LOSS}
    begin = _beginning(spec.begin, terms)
    return replace(spec, begin=begin, losses=losses, no_perplexity=numbers)


def _beginning(begin: Callable[[Any], LayerState], terms: Distilling) -> Callable[..., LayerState]:
    def started(batch: Any) -> LayerState:
        if not isinstance(batch, TaughtBatch):
            return begin(batch)
        weights_2 = getattr(batch.batch, "weights_2", None)
        objective = DistillationLoss(terms, batch.teacher, weights_2)
        return begin(batch.batch).changed(objective=objective)

    return started


@dataclass(frozen=True)
class DistillationLoss:
    """Objective of a micro batch: alpha x cross entropy + beta x temperature^2 x divergence.

    Attributes:
        teacher: the teacher's outputs; if None, the loss is the cross entropy, with weight 1.
        weights_2: weights of the micro batch within its step, as in a batch of instructions.
    """

    terms: Distilling
    teacher: TeacherHead | TopTokens | None
    weights_2: Tensor | None = None

    losses: ClassVar[Mapping[str, float]] = {LM_LOSS: 0.0, KD_LOSS: 0.0, TOTAL_LOSS: 1.0}

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        total, cross_entropy, divergence = self._losses(inputs)
        losses = {LM_LOSS: cross_entropy, KD_LOSS: divergence, TOTAL_LOSS: total}
        if self.weights_2 is None:
            return losses
        weight = self.weights_2[0].to(total.dtype)
        return {name: loss * weight for name, loss in losses.items()}

    def _losses(self, inputs: HeadInput) -> DistilledLosses:
        x_BPH, weight_VH, bias_V, targets, head = inputs
        if self.teacher is None:
            loss = linear_cross_entropy(x_BPH, weight_VH, targets, head, bias_V)
            return DistilledLosses(loss, loss.detach(), torch.zeros_like(loss.detach()))
        teacher = self.teacher
        if isinstance(teacher, TopTokens):
            teacher = TopTokens(*(head.tp.context.take(each, 1) for each in teacher))
        return linear_distillation(x_BPH, weight_VH, targets, head, teacher, self.terms, bias_V)
