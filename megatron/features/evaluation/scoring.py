"""Scoring of texts: the log-probability of each target token, and whether the model finds it most
probable.

Shapes: B batch, P predicted positions, T tokens (B x P), C tokens of a chunk, V this rank's shard
of the vocabulary, K choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.parallel.cross_entropy import LogitChunks, as_computed
from megatron.parallel.loss_head import HeadInput, LossHead, Targets
from megatron.parallel.mesh import Group
from megatron.parallel.softmax_loss import Columns, Softmax, capped, of_ranks, rows_at_a_time


class TokenScores(NamedTuple):
    """Scores of each target token.

    Attributes:
        log_probs_BP: natural logarithm of its probability, float32 or float64; 0 where the loss
            mask is 0.
        correct_BP: whether it is the most probable token; the one with the lowest id if several
            are. False where the loss mask is 0.
    """

    log_probs_BP: Tensor
    correct_BP: Tensor


@torch.no_grad()
def linear_scores(
    x_BPH: Tensor, weight: Tensor, targets: Targets, head: LossHead, bias: Tensor | None = None
) -> TokenScores:
    """Score every target. The arguments are those of :func:`linear_cross_entropy`. The result is
    the same on every rank."""
    whole, weight, bias = as_computed(x_BPH, weight, bias, head.tp)
    with torch.autocast(x_BPH.device.type, enabled=False):
        run = LogitChunks(whole.flatten(0, 1), weight, bias, targets, head, compiled=False)
        log_probs_T, best_T = _scores(run)
    counts_BP = targets.mask_BS > 0
    correct_BP = (best_T == targets.labels_BS.flatten()).view(counts_BP.shape) & counts_BP
    log_probs_BP = log_probs_T.view(counts_BP.shape).masked_fill(~counts_BP, 0.0)
    if targets.whole is None:
        return TokenScores(log_probs_BP, correct_BP)
    whole_BP, right_BP = (
        targets.gathered(each, head.tp.context)
        for each in (log_probs_BP, correct_BP.to(log_probs_BP.dtype))
    )
    return TokenScores(whole_BP, right_BP > 0)


def _scores(run: LogitChunks) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label, and the most probable token, [T] each."""
    used, count = run.columns.used, len(run.x_TH)
    softmax = Softmax(*(run.x_TH.new_zeros(count, dtype=run.work) for _ in Softmax._fields))
    best = BestTokens(run.labels_T, run.work)
    for chunk in run.chunks:
        into = Softmax(*(part[chunk] for part in softmax))
        logits_CV = run.logits(chunk)[:, :used]
        score_chunk(logits_CV, run.labels_T[chunk], run.columns, into, best.best_T[chunk])
    best.largest_T = softmax.largest_C
    if run.group.size > 1:
        softmax = softmax.over_ranks(run.group)
    return -softmax.loss(), best.over_ranks(run.first, run.group)


def score_chunk(
    logits_CV: Tensor, labels_C: Tensor, columns: Columns, softmax: Softmax, best_C: Tensor
) -> None:
    """Fill in, for a chunk of tokens, this rank's share of the softmax, and ``best_C``, its
    column with the largest logit (the first if several are equal). A label may be in another
    rank's shard."""
    absent_C = (labels_C < 0) | (labels_C >= logits_CV.shape[1])
    columns_C = labels_C.masked_fill(absent_C, 0)
    if not logits_CV.shape[1]:
        softmax.largest_C.fill_(-torch.inf)
        return
    for at in rows_at_a_time(logits_CV):
        logits_RV = capped(logits_CV[at].to(softmax.total_C.dtype), columns.softcap)
        softmax.target_C[at] = logits_RV.gather(1, columns_C[at, None]).squeeze(1)
        softmax.largest_C[at], best_C[at] = logits_RV.max(-1)
        softmax.total_C[at] = logits_RV.sub_(softmax.largest_C[at, None]).exp_().sum(-1)
    softmax.target_C.masked_fill_(absent_C, 0.0)


class BestTokens:
    """The most probable token at each position (the first if several are equal) and its logit."""

    def __init__(self, labels_T: Tensor, work: torch.dtype) -> None:
        self.best_T = torch.zeros_like(labels_T)
        self.largest_T = torch.full_like(labels_T, -torch.inf, dtype=work)

    def add(self, chunk: slice, logits_CV: Tensor) -> None:
        """Store this rank's largest logits for a chunk of positions."""
        if logits_CV.shape[1]:
            largest_C, self.best_T[chunk] = logits_CV.max(-1)
            self.largest_T[chunk] = largest_C

    def over_ranks(self, first: int, group: Group) -> Tensor:
        """Return the columns with the largest logits across all ranks. ``first`` is the index of
        this rank's first column."""
        best_T = self.best_T + first
        if group.size == 1:
            return best_T
        # One collective for indices and the bits of logits. float64 can represent every float32.
        bits_RT, best_RT = of_ranks(group, self.largest_T.double().view(torch.int64), best_T)
        largest_RT = bits_RT.view(torch.float64)
        best_RT = best_RT.masked_fill(
            largest_RT < largest_RT.amax(0), torch.iinfo(best_T.dtype).max
        )
        return best_RT.amin(0)


class ScoringObjective:
    """The :class:`~megatron.parallel.loss_head.Objective` for scoring targets. It yields the fields
    of :class:`TokenScores`."""

    losses: Mapping[str, float] = MappingProxyType({})

    def __call__(self, inputs: HeadInput, batch: Any) -> dict[str, Tensor]:
        """Return the result of :func:`linear_scores` as a dictionary."""
        x_BPH, weight_VH, bias_V, targets, head = inputs
        return linear_scores(x_BPH, weight_VH, targets, head, bias_V)._asdict()


SCORES = ScoringObjective()


def token_scores(state: LayerState) -> TokenScores:
    """Return the scores of the targets from the state after the last layer."""
    return TokenScores(*(state.losses[name] for name in TokenScores._fields))


def _text_scores(state: LayerState, batch: Any) -> dict[str, Tensor]:
    log_probs_BP, correct_BP = token_scores(state)
    return {"log_prob": log_probs_BP.double().sum(1), "correct": correct_BP.sum(1)}


TEXT_SCORES = Measure(("log_prob", "correct"), _text_scores, objective=SCORES, per_sample=True)
"""Measure of each sample: the total log-probability of its targets, and the number of targets that
the model finds most probable."""


def _choice_scores(state: LayerState, batch: Any) -> dict[str, Tensor]:
    log_probs_BP, correct_BP = token_scores(state)
    # The gathered scores may be padded to a length that the ranks divide.
    end, count = batch.positions_BP.shape[1], batch.choices_BK.shape[1]
    begin = end - count
    log_prob_B1 = log_probs_BP[:, :begin].double().sum(1, keepdim=True)
    correct_B1 = correct_BP[:, :begin].sum(1, keepdim=True)
    return {
        "log_prob": log_prob_B1 + log_probs_BP[:, begin:end],
        "correct": correct_B1 + correct_BP[:, begin:end],
    }


CHOICE_SCORES = Measure(("log_prob", "correct"), _choice_scores, objective=SCORES, per_sample=True)
"""Like :data:`TEXT_SCORES`, but for each of K choices for a sample's last token, [B, K]."""
