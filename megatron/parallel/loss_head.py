"""Targets of an output head, and the inputs of its losses.

Shapes: B batch, S sequence, P predicted positions (outside tensor-parallel layers, a rank's slice
of them if split), H hidden, V one rank's share of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.context import Context
from megatron.parallel.softmax_loss import capped
from megatron.parallel.tensor_parallel import TensorParallel

_POSITIONS = 8
"""Multiple to which a rank's number of predicted positions is padded, for efficient kernels."""


class Targets(NamedTuple):
    """Token ids (int64) that a model should predict, and a mask: 1 if the loss counts, else 0.

    Attributes:
        positions_BP: positions that predict the targets. None for all positions, in order. If it
          has fewer rows than the hidden states, each row indexes several of their rows, joined.
        of_samples: whether each target belongs to a whole sample rather than to a position.
        whole: the targets of all context ranks, if these are only one rank's.
        places_BP: indices of these targets in ``whole``. None for this rank's chunks, in order.
    """

    labels_BS: Tensor
    mask_BS: Tensor
    positions_BP: Tensor | None = None
    of_samples: bool = False
    whole: Targets | None = None
    places_BP: Tensor | None = None

    def changed(self, **fields: Any) -> Targets:
        """Return a copy of these targets with some fields replaced."""
        # Not _replace: with torch 2.11, compiled code would then return an empty tuple.
        return Targets(**dict(zip(Targets._fields, self, strict=True)) | fields)

    @property
    def total(self) -> Tensor | None:
        """Sum of the mask over all context ranks. None if these targets are complete."""
        return None if self.whole is None else self.whole.mask_BS.sum()

    def divided(self, context: Context, length: int) -> Targets:
        """Return the targets in a context rank's chunks of sequences of ``length`` tokens. With
        ``positions_BP``, keep only this rank's targets with mask 1. Each row is padded to the same
        number of targets, at least one, with mask 0."""
        if self.of_samples:
            return self
        if self.positions_BP is None:
            labels_BS, mask_BS = (context.take(each, 1) for each in self[:2])
            return self.changed(labels_BS=labels_BS, mask_BS=mask_BS, whole=self)
        local_BP, here_BP = context.local(self.positions_BP, length)
        here_BP &= self.mask_BS != 0
        most = -(-max(1, int(here_BP.sum(1).max())) // _POSITIONS) * _POSITIONS
        places_BP = here_BP.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        labels_BP, mask_BP, local_BP = (
            each.gather(1, places_BP) for each in (self.labels_BS, self.mask_BS * here_BP, local_BP)
        )
        targets = self.changed(labels_BS=labels_BP, mask_BS=mask_BP, positions_BP=local_BP)
        return targets.changed(whole=self, places_BP=places_BP)

    def gathered(self, x_BP: Tensor, context: Context) -> Tensor:
        """Return the values of all context ranks' targets in the order of ``whole``. ``x_BP`` has
        this rank's values, 0 where the mask is 0. All ranks must use the result in the same way."""
        if self.whole is None:
            return x_BP
        if self.places_BP is None:
            return context.whole(x_BP, 1)
        zeros = x_BP.new_zeros(self.whole.labels_BS.shape)
        return context.sum(zeros.scatter_add(1, self.places_BP, x_BP))

    def at(self, positions_BP: Tensor) -> Targets:
        """Return the targets at the given positions. If ``positions_BP`` has fewer rows than the
        targets, each of its rows indexes several rows of targets, concatenated."""
        together = (each.reshape(len(positions_BP), -1) for each in self[:2])
        labels_BP, mask_BP = (each.gather(1, positions_BP) for each in together)
        return self.changed(labels_BS=labels_BP, mask_BS=mask_BP)

    def ending_in(self, labels_BK: Tensor) -> Targets:
        """Return these targets with the last K labels replaced. These K count in the loss."""
        first = self.labels_BS.shape[1] - labels_BK.shape[1]
        labels_BP = torch.cat((self.labels_BS[:, :first], labels_BK), dim=1)
        mask_BP = self.mask_BS.clone()
        mask_BP[:, first:] = 1.0
        return self.changed(labels_BS=labels_BP, mask_BS=mask_BP)

    def padded(self, count: int) -> Targets:
        """Return these targets followed by ``count`` targets with mask 0."""
        if not count:
            return self
        labels, mask = (F.pad(each, (0, count)) for each in self[:2])
        places = self.places_BP if self.places_BP is None else F.pad(self.places_BP, (0, count))
        return self.changed(labels_BS=labels, mask_BS=mask, places_BP=places)

    def taken(self, x_BSH: Tensor, tp: TensorParallel) -> tuple[Tensor, Targets]:
        """Return the hidden states of the targets and the targets, padded for an even split."""
        if self.positions_BP is None:
            return x_BSH, self
        missing = -self.positions_BP.shape[1] % tp.slices
        x_BPH = tp.take(x_BSH, F.pad(self.positions_BP, (0, missing)))
        return x_BPH, self.padded(missing)


@dataclass(frozen=True)
class LossHead:
    """Settings with which an output head computes losses from hidden states.

    Attributes:
        softcap: logits become softcap x tanh(logit / softcap). None leaves them unchanged.
        chunk_bytes: maximum size of the logits in memory at a time. 0 means no limit, None the
          device's default.
        z_coeff: see :class:`~megatron.parallel.softmax_loss.Columns`.
    """

    vocab_size: int
    softcap: float | None
    chunk_bytes: int | None
    tp: TensorParallel
    z_coeff: float = 0.0

    def capped(self, logits: Tensor) -> Tensor:
        return capped(logits, self.softcap)


class HeadInput(NamedTuple):
    """Input of an output head.

    Attributes:
        x_BPH: hidden states that predict the targets, scaled as the head requires. With sequence
          parallelism, a rank's slice of them.
        weight_VH: this rank's vocabulary rows, including padding.
        bias_V: bias of the logits, or None.
    """

    x_BPH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    targets: Targets
    head: LossHead


class Objective(Protocol):
    """Losses of a micro batch, and other values to report.

    Attributes:
        losses: weight of each loss in the sum that is minimised, in the order of logging. 0 for
          values that are only reported; they have no perplexity.
    """

    losses: Mapping[str, float]

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        """Return a scalar per name in ``losses``, float32 or float64, equal on all tensor-parallel
        ranks, without a gradient if its weight is 0. Evaluations may return any tensors."""
        ...
