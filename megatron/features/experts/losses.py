"""Losses that keep the experts of a layer evenly used.

All are of one layer and without a coefficient. Balancing losses are 1 if every expert has the same
number of choices. Each rank that shares a micro batch computes the loss of the whole micro batch,
with the gradient of its tokens.

Shapes: T tokens that a rank routes, B samples of the micro batch, E experts, K choices of a token,
L losses.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.flags import LOSSES, Z_LOSS, ExpertsConfig
from megatron.features.experts.router import Routing, widened
from megatron.parallel.mesh import SINGLE, Group

MICRO_BATCH, SAMPLES, GLOBAL_BATCH = (
    LOSSES[kind] for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
)


class GlobalCounts:
    """Choices of a layer in the micro batches of a step so far, of all data-parallel ranks."""

    def __init__(self, samples: Group = SINGLE) -> None:
        self.over(samples)
        self.reset()

    def over(self, samples: Group) -> None:
        """Set the ranks that have different micro batches; each then needs a collective."""
        self._samples = samples

    def reset(self) -> None:
        """Begin a step."""
        self._total_E: Tensor | None = None
        self._to_recompute: deque[Tensor] = deque()

    def with_micro_batch(self, counts_E: Tensor) -> Tensor:
        """Adds another micro batch's choices by expert, int64 [E]. A layer that is recomputed gets
        the numbers of its forward pass, as backward passes of micro batches have the order of their
        forward passes. Without gradients, as in an evaluation, they are the micro batch's alone."""
        if torch._C._current_graph_task_id() != -1:
            return self._to_recompute.popleft()
        counts_E = counts_E.clone()
        if self._samples.size > 1:
            dist.all_reduce(counts_E, group=self._samples.handle)
        if not torch.is_grad_enabled():
            return counts_E
        self._total_E = counts_E if self._total_E is None else self._total_E + counts_E
        self._to_recompute.append(self._total_E)
        return self._total_E


def losses(
    routing: Routing,
    logits_TE: Tensor,
    config: ExpertsConfig,
    experts: int,
    tokens: SharedTokens,
    global_counts: GlobalCounts | None = None,
) -> dict[str, Tensor]:
    """The losses of a layer that have a weight, by name.

    Balancing losses are E x sum over experts of f_i P_i (Fedus et al. 2022, arXiv:2101.03961): P_i
    is the mean probability of an expert, f_i its share of the choices, which are the best
    probabilities, without groups, an expert bias or a capacity, as Megatron-LM's. Shares are those
    of the micro batch; of each sample, with the mean over samples (``seq_``); or of all micro
    batches of a step so far (``global_``, Qiu et al. 2025, arXiv:2501.11873), which
    ``global_counts`` has. transformers' ``load_balancing_loss_func`` is K times the first, because
    its shares add up to K.

    The z-loss is the mean of logsumexp(logits)^2 (Zoph et al. 2022, arXiv:2202.08906).
    """
    names = {name for name, weight in config.loss_weights.items() if weight}
    terms_T = {}
    if Z_LOSS in names:
        terms_T[Z_LOSS] = widened(logits_TE).logsumexp(-1).square()
    if names - {Z_LOSS}:
        scores_TE = routing.scores_TE
        counts_BE = _counts(_choices(routing, config), experts, tokens)
        counts = {MICRO_BATCH: counts_BE.sum(0), SAMPLES: counts_BE}
        if GLOBAL_BATCH in names:
            counts[GLOBAL_BATCH] = counts[MICRO_BATCH]
            if global_counts is not None:
                counts[GLOBAL_BATCH] = global_counts.with_micro_batch(counts[MICRO_BATCH])
        for name in names & counts.keys():
            shares = counts[name].to(scores_TE.dtype)
            shares = shares / shares.sum(-1, keepdim=True)
            shares_TE = shares[tokens.samples_T] if name == SAMPLES else shares
            terms_T[name] = experts * (scores_TE * shares_TE).sum(-1)
    if not terms_T:
        return {}
    ordered = sorted(terms_T)
    terms_LT = torch.stack([terms_T[name] for name in ordered])
    # Samples have equal lengths: the mean over tokens is the mean over samples as well.
    sums_L = tokens.total(terms_LT.masked_fill(tokens.samples_T < 0, 0.0).sum(-1))
    return dict(zip(ordered, (sums_L / tokens.count).unbind(), strict=True))


def _choices(routing: Routing, config: ExpertsConfig) -> Tensor:
    """The choices [T, K] that balancing losses count."""
    limited = (
        config.moe_gate != "megatron"
        or config.moe_router_enable_expert_bias
        or config.moe_router_num_groups is not None
        or config.moe_expert_capacity_factor is not None
        or config.moe_eval_capacity_factor is not None
        or not {"sinkhorn", "quantile_balancing"}.isdisjoint(config.moe_router_load_balancing_type)
    )
    if not limited:
        return routing.experts_TK
    k = config.moe_router_topk
    # DeepSpeed's gate of two choices counts the first.
    k = 1 if config.moe_gate == "deepspeed" and k == 2 else k
    return routing.scores_TE.detach().topk(k).indices


def _counts(chosen_TK: Tensor, experts: int, tokens: SharedTokens) -> Tensor:
    """Choices of each expert in each sample of the micro batch, int64 [B, E]."""
    samples_T1 = tokens.samples_T[:, None]
    # Choices of padding are counted last.
    last = tokens.samples * experts
    places_TK = torch.where(samples_T1 < 0, last, samples_T1 * experts + chosen_TK)
    counts = places_TK.new_zeros(last + 1)
    counts.scatter_add_(0, places_TK.flatten(), torch.ones_like(places_TK).flatten())
    return tokens.sum(counts[:-1]).view(tokens.samples, experts)
