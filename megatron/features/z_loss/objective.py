"""The losses of tokens with a z-loss, from one pass over the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.model.embedding import LM_LOSS
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.cross_entropy import linear_loss_and_z
from megatron.parallel.loss_head import HeadInput

Z_LOSS = "z loss"
"""Name of the mean of log(Z)^2, without its coefficient."""


class ZLoss:
    """The cross entropy of a head's targets, and their z-loss: the gradient of both is that of the
    first, so that it is exact for losses that are added with the weights ``losses`` only."""

    def __init__(self, coeff: float) -> None:
        self.losses: Mapping[str, float] = {LM_LOSS: 1.0, Z_LOSS: coeff}

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        """Scalars by name, the same on every tensor-parallel rank."""
        head = replace(inputs.head, z_coeff=self.losses[Z_LOSS])
        loss, z = linear_loss_and_z(
            inputs.x_BPH, inputs.weight_VH, inputs.targets, head, inputs.bias_V
        )
        return {LM_LOSS: loss, Z_LOSS: z}


def with_z_loss(spec: ModelSpec, coeff: float) -> ModelSpec:
    """Return the model with a z-loss of this coefficient, which evaluations report and leave out of
    their loss."""
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
