"""Predictions of an output head, and the inputs of its losses.

Shapes: B batch, S sequence, P predicted positions (outside the region a rank's slice of them if
that is split), H hidden, V one rank's share of the padded vocabulary.
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
"""Divisor of the number of a rank's targets at positions, for kernels."""


class Targets(NamedTuple):
    """Token ids (int64) that a model should predict, and a mask: 1 where the loss counts, else
    0.

    Attributes:
        positions_BP: where in the sequence they are predicted; None for everywhere, in order. With
            fewer rows than the hidden states: where in these rows, one after another.
        scored: whether each is to be scored, instead of a loss of all.
        of_samples: whether they belong to samples, and not to places of a sequence.
        whole: of all ranks of a context, where these are one's.
        places_BP: where among those these are; None for this rank's part of all, in order.
    """

    labels_BS: Tensor
    mask_BS: Tensor
    positions_BP: Tensor | None = None
    scored: bool = False
    of_samples: bool = False
    whole: Targets | None = None
    places_BP: Tensor | None = None

    def changed(self, **fields: Any) -> Targets:
        """Return these targets with other values of some fields."""
        # Not _replace: a tuple that leaves compiled code through it is empty with torch 2.11.
        return Targets(**dict(zip(Targets._fields, self, strict=True)) | fields)

    @property
    def total(self) -> Tensor | None:
        """Sum of the mask of all ranks of a context; None where these are all targets."""
        return None if self.whole is None else self.whole.mask_BS.sum()

    def divided(self, context: Context, length: int) -> Targets:
        """Return the targets of a rank's part of sequences of ``length`` tokens, which matters for
        targets at positions only. They are the counted ones, padded to the same number in each row,
        and at least one, by others that do not count."""
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
        """Numbers of a rank's targets, [B, P], 0 where these do not count, as those of all ranks'
        targets, in the order of ``whole``; each rank computes the same with them."""
        if self.whole is None:
            return x_BP
        if self.places_BP is None:
            return context.whole(x_BP, 1)
        zeros = x_BP.new_zeros(self.whole.labels_BS.shape)
        return context.sum(zeros.scatter_add(1, self.places_BP, x_BP))

    def at(self, positions_BP: Tensor) -> Targets:
        """Return the targets of some positions, of each row or of as many rows together as there
        are for one of the positions'."""
        together = (each.reshape(len(positions_BP), -1) for each in self[:2])
        labels_BP, mask_BP = (each.gather(1, positions_BP) for each in together)
        return self.changed(labels_BS=labels_BP, mask_BS=mask_BP)

    def ending_in(self, labels_BK: Tensor) -> Targets:
        """Return targets with other labels for the last K, all of which count."""
        first = self.labels_BS.shape[1] - labels_BK.shape[1]
        labels_BP = torch.cat((self.labels_BS[:, :first], labels_BK), dim=1)
        mask_BP = self.mask_BS.clone()
        mask_BP[:, first:] = 1.0
        return self.changed(labels_BS=labels_BP, mask_BS=mask_BP)

    def padded(self, count: int) -> Targets:
        """With further ones that do not count."""
        if not count:
            return self
        labels, mask = (F.pad(each, (0, count)) for each in self[:2])
        places = self.places_BP if self.places_BP is None else F.pad(self.places_BP, (0, count))
        return self.changed(labels_BS=labels, mask_BS=mask, places_BP=places)

    def taken(self, x_BSH: Tensor, tp: TensorParallel) -> tuple[Tensor, Targets]:
        """The hidden states that predict them, and themselves, as many as ranks can divide."""
        if self.positions_BP is None:
            return x_BSH, self
        missing = -self.positions_BP.shape[1] % tp.slices
        x_BPH = tp.take(x_BSH, F.pad(self.positions_BP, (0, missing)))
        return x_BPH, self.padded(missing)


class TokenScores(NamedTuple):
    """Probability of each target.

    Attributes:
        log_probs_BP: natural logarithm of its probability, float32 or float64; 0 where the mask is.
        correct_BP: whether no token is more probable; of several that are equal the first is. False
            where the mask is 0.
    """

    log_probs_BP: Tensor
    correct_BP: Tensor


@dataclass(frozen=True)
class LossHead:
    """Computation of a loss from hidden states.

    Attributes:
        softcap: logits are softcap x tanh(logit / softcap); None leaves them alone.
        chunk_bytes: size of the logits in memory at a time; 0 for all; None for a default that
            suits the device.
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
