"""Routing rules other than plain top-k: capacity limits, Megatron-DeepSpeed's gates, Phi-MoE's
sampling, and Sinkhorn and quantile balancing.

Every rule considers the whole micro batch. Random numbers are drawn for the whole micro batch from
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
"""Phi-MoE's ``router_jitter_noise``. An expert is eligible if its logit is at most twice this
fraction below the largest logit."""


def places(experts_M: Tensor, experts: int, priority_M: Tensor | None = None) -> Tensor:
    """Return the position of each choice among the choices of its expert, int64 [M] from 0. Choices
    are ordered by descending priority, and ties by index. If ``priority_M`` is None, all choices
    are ordered by index."""
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
    """Return a mask [T, K] of this rank's choices that are among the first ``capacity`` of their
    expert in the micro batch, in the order of :func:`places`, or None if every choice is."""
    if capacity >= tokens.count:
        return None
    experts_NK = tokens.gather(experts_TK)
    priority_M = None if priority_NK is None else priority_NK.flatten()
    place_M = places(experts_NK.flatten(), experts, priority_M)
    return tokens.own((place_M < capacity).view_as(experts_NK))


def megatron_capacity(config: ExpertsConfig, experts: int, count: int, training: bool) -> int:
    """Return an expert's capacity for ``count`` = N tokens, as in Megatron-LM's
    ``apply_router_token_dropping``: ceil(N K / E x factor), or all N without a factor."""
    factor = _factor(config, training)
    if factor is None:
        return count
    share = count * config.moe_router_topk / experts
    return max(math.ceil(share * factor), config.moe_min_capacity or 0)


def deepspeed_capacity(config: ExpertsConfig, experts: int, count: int, training: bool) -> int:
    """Return an expert's capacity in DeepSpeed's gates for ``count`` = N tokens: max(ceil(N / E x
    factor x K), minimum), rounded in float32 as DeepSpeed does."""
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
    """Route tokens like top1gating, top2gating and topkgating in ``deepspeed/moe/sharded_moe.py``.
    Return experts [T, K], weights [T, K] and a mask [T, K] of the choices within the capacity (None
    if all are).

    With top-1 routing, an expert over capacity keeps random tokens (the first ones without a seed),
    and the weight is the softmax. With top-2, the second expert is sampled with Gumbel noise
    (without noise or a seed it is the second best), and first choices are kept before second ones,
    in token order. With larger K, the largest scores are kept. For K of 2 or more, the kept weights
    of a token sum to 1. The random numbers differ from DeepSpeed's, which depend on the rank.
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
    """Return experts [T, K] and weights [T, K] of SparseMixer-v2 (Liu et al. 2024,
    arXiv:2409.12136) as in Phi-MoE. Experts are chosen one after the other, each among the
    remaining experts whose logits are close to the best. A weight is the softmax over these
    candidates, so the weights of a token do not add up to 1.

    With a seed, choices are sampled, and the weight of a choice that is not the best is scaled by
    0.3333 with a probability of 3/4; the gradient ignores the scaling (Heun's third-order method).
    Without a seed, the best expert is chosen.
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
    """Random numbers for a micro batch. They are the same on every rank and depend on the order of
    the calls."""

    def __init__(self, seed: int, tokens: SharedTokens, like: Tensor) -> None:
        self._tokens, self._dtype = tokens, like.dtype
        self._generator = torch.Generator(like.device).manual_seed(seed)

    def uniform_N1(self) -> Tensor:
        """Return uniform float32 numbers in [0, 1) for all tokens of the micro batch, [N, 1]."""
        generator = self._generator
        return torch.rand(self._tokens.count, 1, generator=generator, device=generator.device)

    def gumbel_TE(self, experts: int) -> Tensor:
        """Return Gumbel noise for the tokens of this rank, [T, E]."""
        noise_NE = torch.empty(self._tokens.count, experts, device=self._generator.device)
        noise_NE.exponential_(generator=self._generator)
        return -self._tokens.own(noise_NE).clamp(min=1e-38).log().to(self._dtype)


@torch.no_grad()
def sinkhorn(logits_NE: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Scale the rows and columns of exp(logits) until every expert has the same sum, like
    Megatron-LM's ``sinkhorn``. The CPU synchronizes once per iteration."""
    count, experts = logits_NE.shape
    # Subtracting a row's maximum prevents overflow. The scale of a row is arbitrary.
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
    """Return the float32 bias of the logits, [E], that would give each expert N K / E choices of
    this micro batch if the other experts kept theirs. It is the negative beta of Megatron-LM's
    quantile balancing. :func:`blended_bias` needs its mean over a step's micro batches."""
    logits_NE = tokens.gather(logits_TE).float()
    threshold_N1 = (logits_NE + bias_E).topk(k + 1).values[:, -1:]
    share = len(logits_NE) * k // logits_NE.shape[1]
    return -(logits_NE - threshold_N1).topk(share + 1, dim=0).values[-1]


def blended_bias(bias_E: Tensor, mean_E: Tensor, ema: float) -> Tensor:
    """Return the bias after a step of quantile balancing: ``ema`` x the old bias + (1 - ``ema``) x
    the mean over micro batches and data-parallel ranks, shifted to a mean of zero."""
    blended_E = ema * bias_E + (1.0 - ema) * mean_E
    return blended_E - blended_E.mean()
