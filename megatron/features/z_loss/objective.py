"""Cross entropy with a z-loss, from a single pass over the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.cross_entropy import LogitChunks, chunked_losses
from megatron.parallel.loss_head import HeadInput, LossHead, Targets

Z_LOSS = "z loss"
"""Name of the mean of log(Z)^2, without its coefficient."""


class ChunksWithZ(LogitChunks):
    """Loss chunks of a head with ``z_coeff``. The second result is the mean, over tokens whose mask
    is 1, of the squared logarithm of the softmax's denominator."""

    def losses(self) -> tuple[Tensor, ...]:
        self.log_T = torch.empty_like(self.mask_T)
        return *super().losses(), self.log_T.square() @ self.mask_T / self.counted


def linear_loss_and_z(
    x_BSH: Tensor, weight: Tensor, targets: Targets, head: LossHead, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of :func:`~megatron.parallel.cross_entropy.linear_cross_entropy`,
    and the z-loss of :class:`ChunksWithZ`. The gradient of the first is that of the cross entropy
    plus ``z_coeff`` times the z-loss, so that one pass over the logits computes both."""
    loss, z = chunked_losses(ChunksWithZ, x_BSH, weight, targets, head, bias)
    return loss, z


class ZLoss:
    """Objective that computes the cross entropy and the z-loss of a head's targets. The gradient of
    both flows through the cross entropy, so it is exact only if the losses are added with the
    weights ``losses``."""

    def __init__(self, coeff: float) -> None:
        self.losses: Mapping[str, float] = {LM_LOSS: 1.0, Z_LOSS: coeff}

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        """Return scalar losses by name, the same on every tensor-parallel rank."""
        head = replace(inputs.head, z_coeff=self.losses[Z_LOSS])
        loss, z = linear_loss_and_z(
            inputs.x_BPH, inputs.weight_VH, inputs.targets, head, inputs.bias_V
        )
        return {LM_LOSS: loss, Z_LOSS: z}


def with_z_loss(spec: ModelSpec, coeff: float) -> ModelSpec:
    """Return the model with a z-loss of this coefficient. Evaluations report it separately."""
    objective = ZLoss(coeff)
    others = {name: weight for name, weight in spec.losses.items() if name != LM_LOSS}

    def begin(batch: Any) -> LayerState:
        return spec.begin(batch).changed(objective=objective, batch=batch)

    return replace(
        spec,
        begin=begin,
        losses={**objective.losses, **others},
        no_perplexity=spec.no_perplexity | {Z_LOSS},
        training_only=spec.training_only | {Z_LOSS},
    )
