"""Choices of experts by rules other than the best scores: a capacity, Megatron-DeepSpeed's gates,
Phi-MoE's sampling, Sinkhorn's and quantile balancing.

All of them decide over the whole micro batch, and random numbers are drawn for the whole of it from
one seed, so that a result does not depend on which rank routes which token.

Shapes: T tokens that a rank routes, N tokens of the micro batch, sample by sample; E experts, K
choices of a token, M choices of all tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.flags import ExpertsConfig

SPARSE_MIXER_EPS = 0.01
"""Phi-MoE's ``router_jitter_noise``: a choice is among the experts whose logit is less than twice
this share below the largest one."""


def places(experts_M: Tensor, experts: int, priority_M: Tensor | None = None) -> Tensor:
    """Place of each choice among the choices of its expert, int64 [M] from 0: by priority, the
    largest first, and in order where it is equal or None."""
    order_M = torch.arange(len(experts_M), device=experts_M.device)
    place_M = torch.empty_like(order_M)
    counts_E = order_M.new_zeros(experts).scatter_add_(0, experts_M, torch.ones_like(experts_M))
    ranks_M = order_M - (counts_E.cumsum(0) - counts_E).repeat_interleave(
        counts_E, output_size=len(order_M)
    )
    if priority_M is None:
        place_M[experts_M.argsort(stable=True)] = ranks_M
        return place_M
    order_M = priority_M.argsort(descending=True, stable=True)
    place_M[order_M[experts_M[order_M].argsort(stable=True)]] = ranks_M
    return place_M


def within_capacity(
    experts_TK: Tensor,
    capacity: int,
    experts: int,
    tokens: SharedTokens,
    priority_NK: Tensor | None = None,
) -> Tensor | None:
    """True [T, K] for the choices of this rank's tokens among the first ``capacity`` of their
    expert in the micro batch, as :func:`places` orders them; None if no choice can be dropped."""
    if capacity >= tokens.count:
        return None
    experts_NK = tokens.gather(experts_TK)
    priority_M = None if priority_NK is None else priority_NK.flatten()
    place_M = places(experts_NK.flatten(), experts, priority_M)
    return tokens.own((place_M < capacity).view_as(experts_NK))


def megatron_capacity(config: ExpertsConfig, experts: int, count: int, training: bool) -> int:
    """Choices that an expert computes of ``count`` tokens, as Megatron-LM's
    ``apply_router_token_dropping``: ceil(N K / E x factor); all of them without a factor."""
    factor = _factor(config, training)
    if factor is None:
        return count
    share = count * config.moe_router_topk / experts
    return max(math.ceil(share * factor), config.moe_min_capacity or 0)


def deepspeed_capacity(config: ExpertsConfig, experts: int, count: int, training: bool) -> int:
    """Choices that an expert computes in DeepSpeed's gates: max(ceil(N / E x factor x K), minimum),
    rounded in float32 as they do."""
    factor = _factor(config, training)
    if factor is None or not config.moe_token_dropping:
        return count
    factor_32 = torch.tensor(factor * config.moe_router_topk, dtype=torch.float32)
    return max(int(torch.ceil((count / experts) * factor_32)), config.moe_min_capacity or 0)


def _factor(config: ExpertsConfig, training: bool) -> float | None:
    evaluation = config.moe_eval_capacity_factor
    return config.moe_expert_capacity_factor if training or evaluation is None else evaluation


def deepspeed_gate(
    logits_TE: Tensor,
    config: ExpertsConfig,
    tokens: SharedTokens,
    training: bool,
    seed: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Experts [T, K], weights [T, K] and which of them are within the capacity (None: all), as
    top1gating, top2gating and topkgating of ``deepspeed/moe/sharded_moe.py``.

    Of one choice, an expert keeps random tokens (its first ones without a seed), with the softmax
    as weight. Of two, the second expert is sampled with Gumbel noise (the second best without it or
    without a seed); an expert keeps first choices before second ones, in order of the tokens. Of
    more, it keeps the largest. From two choices on, the weights that are kept add up to 1. The
    random numbers are not DeepSpeed's, which differ between ranks.
    """
    experts, k = logits_TE.shape[1], config.moe_router_topk
    draws = None if seed is None else _Draws(seed, tokens, logits_TE)
    scores_TE = logits_TE.softmax(-1)
    priority_NK = None
    if k > 2:
        experts_TK = scores_TE.topk(k).indices
        priority_NK = tokens.gather(scores_TE.gather(1, experts_TK))
    else:
        experts_TK = scores_TE.argmax(-1, keepdim=True)
        if k == 1 and draws is not None:
            priority_NK = draws.uniform_N1()
    if k == 2:
        sampled_TE = logits_TE.detach()
        if config.moe_top2_2nd_expert_sampling and draws is not None:
            sampled_TE = sampled_TE + draws.gumbel_TE(experts)
        others_TE = sampled_TE.scatter(1, experts_TK, -torch.inf)
        experts_TK = torch.cat([experts_TK, others_TE.argmax(-1, keepdim=True)], -1)
        priority_NK = torch.arange(1, -1, -1, device=logits_TE.device).expand(tokens.count, 2)
    capacity = deepspeed_capacity(config, experts, tokens.count, training)
    kept_TK = within_capacity(experts_TK, capacity, experts, tokens, priority_NK)
    weights_TK = scores_TE.gather(1, experts_TK)
    if kept_TK is not None:
        weights_TK = weights_TK * kept_TK
    if k > 1:
        smallest = torch.finfo(weights_TK.dtype).eps
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=smallest)
    return experts_TK, weights_TK, kept_TK


def sparse_mixer(
    logits_TE: Tensor, k: int, tokens: SharedTokens, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Experts [T, K] and weights [T, K] of SparseMixer-v2 (Liu et al. 2024, arXiv:2409.12136) as in
    Phi-MoE: one choice after the other among the remaining experts near the best one, each with the
    softmax over these as its weight; the weights do not add up to 1.

    With a seed, choices are sampled, and a weight that is not the largest is scaled by 0.3333 in
    three of four cases, of which its gradient does not know (Heun's third-order method). Without
    one, the best is chosen.
    """
    draws = None if seed is None else _Draws(seed, tokens, logits_TE)
    remaining_TE, size_TE = logits_TE, logits_TE.detach().abs()
    chosen, weights = [], []
    for _ in range(k):
        best_T1 = remaining_TE.detach().amax(-1, keepdim=True)
        below_TE = (best_T1 - logits_TE.detach()) / size_TE.clamp(min=best_T1)
        near_TE = remaining_TE.masked_fill(below_TE > 2 * SPARSE_MIXER_EPS, -torch.inf)
        scores_TE = near_TE.softmax(-1)
        top_T1 = scores_TE.argmax(-1, keepdim=True)
        if draws is None:
            expert_T1, weight_T1 = top_T1, scores_TE.gather(1, top_T1)
        else:
            expert_T1 = (near_TE + draws.gumbel_TE(logits_TE.shape[1])).argmax(-1, keepdim=True)
            weight_T1 = scores_TE.gather(1, expert_T1)
            whole_T1 = (expert_T1 == top_T1) | (tokens.own(draws.uniform_N1()) > 0.75)
            scaled_T1 = torch.where(whole_T1, 1.0, 0.3333).to(weight_T1.dtype)
            weight_T1 = weight_T1 + (scaled_T1 - 1) * weight_T1.detach()
        remaining_TE = remaining_TE.scatter(1, expert_T1, -torch.inf)
        chosen.append(expert_T1)
        weights.append(weight_T1)
    return torch.cat(chosen, -1), torch.cat(weights, -1)


class _Draws:
    """Random numbers of a micro batch, the same on every rank, in the order of the calls."""

    def __init__(self, seed: int, tokens: SharedTokens, like: Tensor) -> None:
        self._tokens, self._dtype = tokens, like.dtype
        self._generator = torch.Generator(like.device).manual_seed(seed)

    def uniform_N1(self) -> Tensor:
        """In [0, 1), float32, for all tokens."""
        generator = self._generator
        return torch.rand(self._tokens.count, 1, generator=generator, device=generator.device)

    def gumbel_TE(self, experts: int) -> Tensor:
        """Gumbel noise for the tokens of this rank."""
        noise_NE = torch.empty(self._tokens.count, experts, device=self._generator.device)
        noise_NE.exponential_(generator=self._generator)
        return -self._tokens.own(noise_NE).clamp(min=1e-38).log().to(self._dtype)


@torch.no_grad()
def sinkhorn(logits_NE: Tensor, tolerance: float = 1e-4) -> Tensor:
    """exp(logits) with rows and columns scaled until every expert has the same sum, as
    Megatron-LM's ``sinkhorn``. The CPU synchronizes once an iteration."""
    count, experts = logits_NE.shape
    # Rows can have any scale, so that their maximum does not matter and exp does not overflow.
    cost_NE = (logits_NE - logits_NE.amax(-1, keepdim=True)).exp()
    columns_E, error = cost_NE.new_ones(experts), torch.inf
    while error > tolerance:
        rows_N = 1 / (count * ((cost_NE * columns_E).sum(1) + 1e-8))
        before_E = columns_E
        columns_E = 1 / (experts * ((cost_NE * rows_N[:, None]).sum(0) + 1e-8))
        error = float((columns_E - before_E).abs().mean())
    return cost_NE * columns_E * rows_N[:, None]


@torch.no_grad()
def quantile_bias(logits_TE: Tensor, bias_E: Tensor, k: int, tokens: SharedTokens) -> Tensor:
    """Bias of the logits [E], float32, with which each expert would have N K / E of the choices of
    this micro batch if the other experts kept theirs: the negative beta of Megatron-LM's quantile
    balancing. The mean over the micro batches of a step is what :func:`blended_bias` needs."""
    logits_NE = tokens.gather(logits_TE).float()
    threshold_N1 = (logits_NE + bias_E).topk(k + 1).values[:, -1:]
    share = len(logits_NE) * k // logits_NE.shape[1]
    return -(logits_NE - threshold_N1).topk(share + 1, dim=0).values[-1]


def blended_bias(bias_E: Tensor, mean_E: Tensor, ema: float) -> Tensor:
    """Bias after a step of quantile balancing: ``ema`` of the old one and the rest of the mean over
    micro batches and data-parallel ranks, with a mean of zero."""
    blended_E = ema * bias_E + (1.0 - ema) * mean_E
    return blended_E - blended_E.mean()
