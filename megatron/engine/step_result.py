"""What an optimizer step gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, or will have done once the device gets there.

    To make a number of a tensor waits for the device.

    Attributes:
        loss: what was minimised, the weighted sum of ``losses``; a scalar on the device.
        losses: means over micro batches and data-parallel ranks by name, scalars on the device.
        grad_norm: global 2-norm of the gradients before clipping, infinite when they are not
            finite; a scalar on the device, or a number that the host has already.
        skipped: 1 where the gradients were not finite, so that no weight changed, else 0; a scalar
            on the device, or what the host knows.
        loss_scale: the scale that the loss had.
    """

    loss: Tensor
    losses: Mapping[str, Tensor]
    grad_norm: Tensor | float
    skipped: Tensor | bool
    loss_scale: float
