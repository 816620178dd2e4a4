"""What an output head predicts, and what its losses are computed of.

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

from megatron.parallel.softmax_loss import capped
from megatron.parallel.tensor_parallel import TensorParallel


class Targets(NamedTuple):
    """Token ids (int64) that a model should predict, and a mask: 1 where the loss counts, else
    0.

    Attributes:
        positions_BP: where in the sequence they are predicted; None for everywhere, in order. With
            fewer rows than the hidden states: where in these rows, one after another.
        scored: whether each is to be scored, instead of a loss of all.
    """

    labels_BS: Tensor
    mask_BS: Tensor
    positions_BP: Tensor | None = None
    scored: bool = False

    def at(self, positions_BP: Tensor) -> Targets:
        """Those of some positions, of each row or of as many rows together as there are for one of
        the positions'."""
        together = (each.reshape(len(positions_BP), -1) for each in self[:2])
        labels_BP, mask_BP = (each.gather(1, positions_BP) for each in together)
        return Targets(labels_BP, mask_BP, self.positions_BP, self.scored)

    def ending_in(self, labels_BK: Tensor) -> Targets:
        """With other labels for the last K, all of which count."""
        first = self.labels_BS.shape[1] - labels_BK.shape[1]
        labels_BP = torch.cat((self.labels_BS[:, :first], labels_BK), dim=1)
        mask_BP = self.mask_BS.clone()
        mask_BP[:, first:] = 1.0
        return Targets(labels_BP, mask_BP, self.positions_BP, self.scored)

    def padded(self, count: int) -> Targets:
        """With further ones that do not count."""
        if not count:
            return self
        labels, mask = (F.pad(each, (0, count)) for each in self[:2])
        return Targets(labels, mask, self.positions_BP, self.scored)

    def taken(self, x_BSH: Tensor, tp: TensorParallel) -> tuple[Tensor, Targets]:
        """The hidden states that predict them, and themselves, as many as ranks can divide."""
        if self.positions_BP is None:
            return x_BSH, self
        missing = -self.positions_BP.shape[1] % tp.slices
        x_BPH = tp.take(x_BSH, F.pad(self.positions_BP, (0, missing)))
        return x_BPH, self.padded(missing)


class TokenScores(NamedTuple):
    """How probable a model finds each target.

    Attributes:
        log_probs_BP: natural logarithm of its probability, float32 or float64; 0 where the mask is.
        correct_BP: whether no token is more probable; of several that are equal the first is. False
            where the mask is 0.
    """

    log_probs_BP: Tensor
    correct_BP: Tensor


@dataclass(frozen=True)
class LossHead:
    """How hidden states become a loss.

    Attributes:
        softcap: logits are softcap x tanh(logit / softcap); None leaves them alone.
        chunk_bytes: size of the logits in memory at a time; 0 for all; None for a default that
            suits the device.
    """

    vocab_size: int
    softcap: float | None
    chunk_bytes: int | None
    tp: TensorParallel

    def capped(self, logits: Tensor) -> Tensor:
        return capped(logits, self.softcap)


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
