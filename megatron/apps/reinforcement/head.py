"""Log-probabilities of tokens and entropies of their distributions, with gradients.

The computation is chunked, as for the preference losses (log_probs.py). The logits are kept for the
backward pass if there is only one chunk.

Shapes: B batch, P positions (with sequence parallelism, a rank's slice outside the region), T
tokens (B x P), C tokens of a chunk, R rows of a chunk, H hidden, V one rank's vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.features.preference.log_probs import token_values
from megatron.kernels.sums import rows_of_work
from megatron.parallel.cross_entropy import LogitChunks
from megatron.parallel.loss_head import HeadInput
from megatron.parallel.softmax_loss import capped, of_ranks, slices

DEVICE_ROWS = 256
"""Number of rows of logits to process at a time on GPUs."""


ScoreChunk = Callable[[LogitChunks, slice, Tensor], Tensor]
"""Function that computes the log-probabilities [C] of a chunk's labels from its logits [C, V]."""


class TokenNumbers(NamedTuple):
    """Log-probability and entropy of each target, [B, P] over all context-parallel ranks, float32
    or float64, and 0 where the mask is 0. Values and gradients must be equal on all tensor-parallel
    ranks.

    Attributes:
        log_probs_BP: natural logarithm of the target's probability.
        entropies_BP: entropy of the distribution that the target is drawn from, in nats.
    """

    log_probs_BP: Tensor
    entropies_BP: Tensor


def token_numbers(
    inputs: HeadInput, temperature: float, score: ScoreChunk | None = None
) -> TokenNumbers:
    """Return the log-probabilities and entropies of a head's targets, with the logits divided by
    ``temperature``. If given, ``score`` computes the log-probabilities instead."""
    work = partial(_Softmax, temperature=temperature, score=score)
    numbers, context = token_values(inputs, work, compiled=False), inputs.head.tp.context
    return TokenNumbers(*(inputs.targets.gathered(each, context) for each in numbers))


class _Softmax:
    """Log-probabilities and entropies of all tokens, [T] each, in the dtype of the computation."""

    def __init__(
        self, run: LogitChunks, temperature: float, score: ScoreChunk | None = None
    ) -> None:
        self._run, self._temperature, self._score = run, temperature, score
        self._used, self._softcap = run.columns.used, run.columns.softcap
        absent_T = (run.labels_T < 0) | (run.labels_T >= self._used)
        self._columns_T = run.labels_T.masked_fill(absent_T, 0)
        self._here_T = (~absent_T).to(run.work)

    def read(self, training: bool) -> Sequence[Tensor]:
        """Compute the log-probabilities and entropies."""
        # Four values per token: the largest logit, the sum of exp(logit - largest), the sum of
        # exp(logit - largest) x (logit - largest), and the label's logit.
        run = self._run
        known_4T = run.x_TH.new_zeros((4, len(run.x_TH)), dtype=run.work)
        known_4T[0] = torch.finfo(run.work).min
        scored_T = torch.zeros_like(run.mask_T)
        for chunk in reversed(run.chunks):
            logits_CP = run.logits(chunk)
            self._read(logits_CP, chunk, known_4T)
            if self._score is not None:
                scored_T[chunk] = self._score(run, chunk, logits_CP)
        self._largest_T, total_T, product_T, target_T = _over_ranks(run, known_4T)
        self._log_total_T = total_T.log()
        if self._score is None:
            scored_T = (target_T - self._largest_T) - self._log_total_T
        entropies_T = self._log_total_T - product_T / total_T
        absent_T = run.mask_T == 0
        self._entropies_T = entropies_T.masked_fill(absent_T, 0.0)
        return scored_T.masked_fill(absent_T, 0.0), self._entropies_T

    def gradient(self, chunk: slice, parts_NT: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of a chunk's logits. It overwrites the logits."""
        run = self._run
        logits_CP = run.logits_CP if len(run.chunks) == 1 else run.logits(chunk)
        self._write_gradient(logits_CP, chunk, parts_NT)
        return logits_CP, None

    def _softened(self, logits_CP: Tensor, at: slice) -> Tensor:
        """Return the logits of some rows, softcapped and divided by the temperature, [R, V]."""
        wide_RV = logits_CP[at, : self._used].to(self._run.work)
        return capped(wide_RV, self._softcap) / self._temperature

    def _parts(self, logits_CP: Tensor) -> list[slice]:
        rows = DEVICE_ROWS if logits_CP.is_cuda else rows_of_work(max(1, self._used))
        return list(slices(len(logits_CP), rows)) if self._used else []

    def _read(self, logits_CP: Tensor, chunk: slice, known_4T: Tensor) -> None:
        into_4C, columns_C = known_4T[:, chunk], self._columns_T[chunk]
        for at in self._parts(logits_CP):
            soft_RV = self._softened(logits_CP, at)
            target_R = soft_RV.gather(1, columns_C[at, None]).squeeze(1)
            into_4C[3, at] = target_R * self._here_T[chunk][at]
            into_4C[0, at] = largest_R = soft_RV.amax(-1)
            exponent_RV = soft_RV.sub_(largest_R[:, None])
            share_RV = exponent_RV.exp()
            into_4C[1, at] = share_RV.sum(-1)
            into_4C[2, at] = share_RV.mul_(exponent_RV).sum(-1)

    def _write_gradient(self, logits_CP: Tensor, chunk: slice, parts_2T: Tensor) -> None:
        """Overwrite the logits of a chunk with their gradient. ``parts_2T`` contains the gradients
        of the log-probabilities and entropies."""
        into_CP = logits_CP
        log_prob_C1, entropy_C1 = parts_2T[:, chunk, None]
        for at in self._parts(logits_CP):
            soft_RV = self._softened(logits_CP, at)
            log_p_RV = soft_RV - (self._largest_T + self._log_total_T)[chunk][at, None]
            p_RV = log_p_RV.exp()
            # Gradient of the entropy H with respect to a logit: -p (log p + H).
            grad_RV = log_p_RV.add_(self._entropies_T[chunk][at, None]).mul_(-entropy_C1[at])
            grad_RV = grad_RV.sub_(log_prob_C1[at]).mul_(p_RV)
            label_R1 = log_prob_C1[at] * self._here_T[chunk][at, None]
            grad_RV.scatter_add_(1, self._columns_T[chunk][at, None], label_R1)
            grad_RV /= self._temperature
            if self._softcap is not None:
                ratio_RV = soft_RV * (self._temperature / self._softcap)
                grad_RV *= 1.0 - ratio_RV.square_()
            into_CP[at, : self._used] = grad_RV
        into_CP[:, self._used :] = 0.0


def _over_ranks(run: LogitChunks, known_4T: Tensor) -> Tensor:
    """Combine the softmax statistics of all vocabulary shards."""
    if run.group.size == 1:
        return known_4T
    largest_NT, total_NT, product_NT, target_NT = of_ranks(run.group, *known_4T)
    largest_T = largest_NT.amax(0)
    lower_NT = largest_NT - largest_T
    factor_NT = lower_NT.exp()
    # A rank without vocabulary columns has a total of 0 and a hugely negative difference. Their
    # product must be 0.
    lower_NT = lower_NT.masked_fill(total_NT == 0, 0.0)
    product_T = ((product_NT + lower_NT * total_NT) * factor_NT).sum(0)
    return torch.stack((largest_T, (total_NT * factor_NT).sum(0), product_T, target_NT.sum(0)))
