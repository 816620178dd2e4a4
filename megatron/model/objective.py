"""What the last layer of a language model computes in training, if not the cross entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron.parallel.cross_entropy import LossHead, Targets


class HeadInput(NamedTuple):
    """What an output head computes its logits of.

    Attributes:
        x_BPH: hidden states that predict the targets (a rank's slice of them where the region is
            split), scaled as the head scales its input.
        weight_VH: this rank's rows of the vocabulary, padding included.
        bias_V: of the logits, or None.
    """

    x_BPH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    targets: Targets
    head: LossHead


class Objective(Protocol):
    """Losses, and numbers to report, of a micro batch.

    Attributes:
        losses: weight of each in the number that is minimised, in the order of logging; 0 for
            numbers that are only reported, which have no perplexity.
    """

    losses: Mapping[str, float]

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        """Scalars by the names of ``losses``, float32 or float64, the same on every tensor-parallel
        rank; those of weight 0 without a gradient."""
        ...
