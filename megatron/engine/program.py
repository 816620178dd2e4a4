"""What an engine runs, and what a step of it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.model.layer_list import LayerSpec
from megatron.parallel.cross_entropy import Targets
from megatron.parallel.region import TensorParallel


class Batch(Protocol):
    """A micro batch that can move to a device."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """The batch on ``device``."""
        ...


@dataclass(frozen=True)
class ModelInputs:
    """What the layers need of a micro batch.

    Attributes:
        tokens_BS: token ids, int64.
        position_ids_BS: int64; None for 0, 1, 2, ...
        document_ids_BS: int64; a token attends to equal ids only. None when it attends to all.
        targets: what the loss is measured by.
    """

    tokens_BS: Tensor
    targets: Targets
    position_ids_BS: Tensor | None = None
    document_ids_BS: Tensor | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A model as a layer list, and what to do with its batches.

    Attributes:
        layers: the layers, cut over tensor-parallel ranks; the last gives the mean loss of a micro
            batch.
        inputs: what the layers need of a batch.
    """

    layers: Callable[[TensorParallel], list[LayerSpec]]
    inputs: Callable[[Any], ModelInputs]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, or will have done once the device gets there.

    To make a number of a tensor waits for the device.

    Attributes:
        loss: mean loss over micro batches and data-parallel ranks, a scalar on the device.
        grad_norm: global 2-norm of the gradients before clipping, infinite when they are not
            finite; a scalar on the device, or a number that the host has already.
        skipped: 1 where the gradients were not finite, so that no weight changed, else 0; a scalar
            on the device, or what the host knows.
        loss_scale: the scale that the loss had.
    """

    loss: Tensor
    grad_norm: Tensor | float
    skipped: Tensor | bool
    loss_scale: float
