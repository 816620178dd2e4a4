"""From the router's logits to the experts of each token and their weights.

Shapes: T tokens that a rank routes, H hidden, E experts, G groups of experts, K choices of a token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.features.experts.exchange import SharedTokens
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.experts.gates import (
    deepspeed_gate,
    megatron_capacity,
    sinkhorn,
    sparse_mixer,
    within_capacity,
)

_VECTOR = 32
"""Numbers that elementwise kernels of CPUs take at a time."""


class Routing(NamedTuple):
    """The choices of this rank's tokens.

    Attributes:
        experts_TK: expert of each choice, int64, the best first; E for one that exceeds a capacity
            and for padding.
        weights_TK: float32, or float64 of float64 logits; 0 where ``experts_TK`` is E.
        scores_TE: probabilities over all experts for balancing losses; the same dtype.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


class _WideLinear(torch.autograd.Function):
    """A GEMM in another dtype than its inputs, which are saved unconverted: copies in that dtype
    would occupy memory until the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        bias_E = None if bias_E is None else bias_E.to(dtype)
        return F.linear(x_TH.to(dtype), weight_EH.to(dtype), bias_E)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weight_EH = ctx.saved_tensors
        x, weight, bias, _ = ctx.needs_input_grad
        dtype = grad_TE.dtype
        return (
            (grad_TE @ weight_EH.to(dtype)).to(x_TH.dtype) if x else None,
            (grad_TE.T @ x_TH.to(dtype)).to(weight_EH.dtype) if weight else None,
            grad_TE.sum(0).to(ctx.bias_dtype) if bias else None,
            None,
        )


def logits(
    x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """[T, H] to logits [T, E], computed in ``dtype`` or the wider dtype of ``x_TH`` (None: as
    ``x_TH``), with gradients in the dtypes of the inputs."""
    dtype = x_TH.dtype if dtype is None else torch.promote_types(dtype, x_TH.dtype)
    if x_TH.dtype == weight_EH.dtype == dtype:
        return F.linear(x_TH, weight_EH, bias_E)
    return _WideLinear.apply(x_TH, weight_EH, bias_E, dtype)


def widened(logits_TE: Tensor) -> Tensor:
    """Logits in the dtype in which choices, weights and losses are computed: float32, or float64 if
    they are float64."""
    return logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()


def route(
    logits_TE: Tensor,
    config: ExpertsConfig,
    experts: int,
    tokens: SharedTokens,
    training: bool,
    expert_bias_E: Tensor | None = None,
    seed: int | None = None,
    apart: bool = False,
) -> Routing:
    """Experts and weights of this rank's tokens, by Megatron-LM's
    ``topk_routing_with_score_function`` and ``apply_router_token_dropping`` or another gate.

    Args:
        experts: number of experts of this layer, E.
        expert_bias_E: added to the scores (to the logits with quantile balancing) in the choice;
            weights do not include it.
        seed: seed of gates that draw random numbers, the same on all ranks that share the micro
            batch; None to choose without random numbers.
        apart: True if a token's scores must be bitwise independent of the number of tokens.
    """
    wide_TE, k = widened(logits_TE), config.moe_router_topk
    function = config.moe_router_score_function
    if "sinkhorn" in config.moe_router_load_balancing_type:
        function = "sigmoid" if k == 1 else "softmax"
    if apart and function != "softmax":
        # Elementwise kernels compute what does not fill a vector by other code.
        padded_TE = F.pad(wide_TE, (0, -wide_TE.shape[-1] % _VECTOR), value=-math.inf)
        scores_TE = _scores(padded_TE, function)[..., : wide_TE.shape[-1]]
    else:
        scores_TE = _scores(wide_TE, function)
    kept_TK = None
    if config.moe_gate == "deepspeed":
        experts_TK, weights_TK, kept_TK = deepspeed_gate(wide_TE, config, tokens, training, seed)
    elif config.moe_gate == "sparsemixer":
        experts_TK, weights_TK = sparse_mixer(wide_TE, k, tokens, seed)
    else:
        order_TE = _order(wide_TE, scores_TE, config, tokens, training, expert_bias_E)
        experts_TK = order_TE.topk(k).indices
        weights_TK = _weights(wide_TE, scores_TE, experts_TK, config)
        capacity = megatron_capacity(config, experts, tokens.count, training)
        if capacity < tokens.count:
            by_weight = config.moe_token_drop_policy == "probs"
            priority_NK = tokens.gather(weights_TK) if by_weight else None
            kept_TK = within_capacity(experts_TK, capacity, experts, tokens, priority_NK)
    left_out_TK = (tokens.samples_T < 0)[:, None]
    if kept_TK is not None:
        left_out_TK = left_out_TK | ~kept_TK
    if function != "softmax":
        scores_TE = _normalized(scores_TE)
    return Routing(
        experts_TK.masked_fill(left_out_TK, experts),
        weights_TK.masked_fill(left_out_TK, 0.0),
        scores_TE,
    )


def _scores(logits_TE: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return logits_TE.softmax(-1)
    return logits_TE.sigmoid() if function == "sigmoid" else F.softplus(logits_TE).sqrt()


def _normalized(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def _softmax_of_chosen(config: ExpertsConfig) -> bool:
    """True if weights are the softmax over the logits of the chosen experts."""
    return (
        config.moe_router_score_function == "softmax"
        and not config.moe_router_pre_softmax
        and "sinkhorn" not in config.moe_router_load_balancing_type
    )


@torch.no_grad()
def _order(
    logits_TE: Tensor,
    scores_TE: Tensor,
    config: ExpertsConfig,
    tokens: SharedTokens,
    training: bool,
    bias_E: Tensor | None,
) -> Tensor:
    """Return values [T, E], the K largest of which are chosen."""
    balancing = config.moe_router_load_balancing_type
    if "sinkhorn" in balancing and training:
        return tokens.own(sinkhorn(tokens.gather(logits_TE)))
    by_logits = "quantile_balancing" in balancing or _softmax_of_chosen(config)
    order_TE = logits_TE if by_logits else scores_TE
    if bias_E is not None:
        order_TE = order_TE + bias_E
    if config.moe_router_num_groups is None or config.moe_router_group_topk is None:
        return order_TE
    return _limited(order_TE, config, config.moe_router_num_groups, config.moe_router_group_topk)


def _limited(order_TE: Tensor, config: ExpertsConfig, groups: int, best_groups: int) -> Tensor:
    """``order_TE`` with -inf for experts outside the best groups. A group's value is the sum of its
    best K // ``best_groups`` (DeepSeek-V3, arXiv:2412.19437) or its best (DeepSeek-V2)."""
    order_TGE = order_TE.unflatten(-1, (groups, -1))
    summed = config.moe_router_topk // best_groups
    if config.moe_router_group_score == "max":
        summed = 1
    groups_TG = order_TGE.topk(summed).values.sum(-1)
    outside_TG = torch.ones_like(groups_TG, dtype=torch.bool)
    outside_TG.scatter_(1, groups_TG.topk(best_groups).indices, False)
    return order_TGE.masked_fill(outside_TG[..., None], -torch.inf).flatten(1)


def _weights(
    logits_TE: Tensor, scores_TE: Tensor, experts_TK: Tensor, config: ExpertsConfig
) -> Tensor:
    if _softmax_of_chosen(config):
        weights_TK = logits_TE.gather(1, experts_TK).softmax(-1)
    else:
        weights_TK = scores_TE.gather(1, experts_TK)
        normalize = config.moe_router_normalize
        if normalize is None:
            # As Megatron-LM: softmax never, the others from two choices on.
            normalize = config.moe_router_score_function != "softmax" and experts_TK.shape[1] > 1
        if normalize:
            weights_TK = _normalized(weights_TK)
    factor = config.moe_router_topk_scaling_factor
    return weights_TK if factor is None else weights_TK * factor
