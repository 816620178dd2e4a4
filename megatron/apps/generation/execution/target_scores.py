"""Log-probabilities of tokens from logits whose columns are cut over tensor-parallel ranks.

Shapes: R rows, P one rank's columns of the padded vocabulary, V vocabulary, A ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.mesh import Group


def whole_logits(logits_RP: Tensor, vocab_size: int, group: Group) -> Tensor:
    """float32 [R, V] on every rank."""
    return torch.cat(_gathered(logits_RP, group), dim=1)[:, :vocab_size].float()


def score_rows(
    logits_RP: Tensor, targets_R: Tensor, top: int, vocab_size: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability float32 [R] of a target in each row, and the ``top`` most probable tokens
    with theirs, best first, int64 and float32 [R, top]; the same on every rank."""
    columns = logits_RP.shape[1]
    first = group.rank * columns
    logits_RP = logits_RP.float()
    # In whole rows: their sums are the same whatever other rows there are.
    logits_RP[:, max(0, min(columns, vocab_size - first)) :] = -torch.inf
    own_R = targets_R - first
    absent_R = (own_R < 0) | (own_R >= columns)
    target_R = logits_RP.gather(1, own_R.masked_fill(absent_R, 0)[:, None])[:, 0]
    target_R = target_R.masked_fill(absent_R, -torch.inf)
    best = logits_RP.topk(min(top, columns), -1)
    largest_R = logits_RP.amax(-1)
    # A rank may have padding only.
    finite_R1 = largest_R.clamp(min=torch.finfo(torch.float32).min)[:, None]
    sums_R = (logits_RP - finite_R1).exp_().sum(-1)
    # The rest in float64, where the rounding of what differs between batches does not show.
    norms_R = sums_R.double().log() + largest_R.double()
    if group.size > 1:
        norms_R = torch.stack(_gathered(norms_R, group)).logsumexp(0)
        target_R = torch.stack(_gathered(target_R, group)).amax(0)
        values_RK = torch.cat(_gathered(best.values, group), 1)
        tokens_RK = torch.cat(_gathered(best.indices + first, group), 1)
    else:
        values_RK, tokens_RK = best
    # Stable: of equal ones the first token, as in the logits of one rank.
    order_RK = values_RK.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    top_logprobs = (values_RK.gather(1, order_RK).double() - norms_R[:, None]).float()
    logprobs = (target_R.double() - norms_R).float()
    return logprobs, tokens_RK.gather(1, order_RK), top_logprobs


def _gathered(x: Tensor, group: Group) -> list[Tensor]:
    if group.size == 1:
        return [x]
    x = x.contiguous()
    found = [torch.empty_like(x) for _ in range(group.size)]
    dist.all_gather(found, x, group=group.handle)
    return found
