"""Choice of the experts of each token, and of their weights, from the router's logits.

Shapes: T tokens that a rank routes, H hidden, E experts, G groups of experts, K choices per
token.
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
"""Number of elements that elementwise CPU kernels process at a time. Experts are padded to it."""


class Routing(NamedTuple):
    """Routing of this rank's tokens.

    Attributes:
        experts_TK: expert of each choice, int64, best first; E for padding and dropped choices.
        weights_TK: float32, or float64 for float64 logits; 0 where ``experts_TK`` is E.
        scores_TE: probabilities over all experts, for balancing losses, in the weights' dtype.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


class _WideLinear(torch.autograd.Function):
    """GEMM in a different dtype than its inputs. Only the unconverted inputs are saved for the
    backward pass, because converted copies would occupy memory until then."""

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
    """Compute logits [T, E] from tokens [T, H] in the dtype of ``x_TH``, or in ``dtype`` if that is
    wider. Gradients have the dtypes of the inputs."""
    dtype = x_TH.dtype if dtype is None else torch.promote_types(dtype, x_TH.dtype)
    if x_TH.dtype == weight_EH.dtype == dtype:
        return F.linear(x_TH, weight_EH, bias_E)
    return _WideLinear.apply(x_TH, weight_EH, bias_E, dtype)


def widened(logits_TE: Tensor) -> Tensor:
    """Convert logits to the dtype in which choices, weights and losses are computed: float32, or
    float64 if the logits are float64."""
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
    """Choose the experts and weights of this rank's tokens as Megatron-LM's
    ``topk_routing_with_score_function`` and ``apply_router_token_dropping`` do, or with another
    gate.

    Args:
        experts: number of experts of this layer, E.
        expert_bias_E: bias added to the scores (with quantile balancing, to the logits) when
            choosing, but not to the weights.
        seed: seed of gates that draw random numbers, the same on all ranks that share the micro
            batch; None to choose without random numbers.
        apart: True if a token's scores must be bitwise independent of the number of tokens.
    """
    wide_TE, k = widened(logits_TE), config.moe_router_topk
    function = config.moe_router_score_function
    if "sinkhorn" in config.moe_router_load_balancing_type:
        function = "sigmoid" if k == 1 else "softmax"
    if apart and function != "softmax":
        # Elementwise kernels use different code for a remainder that does not fill a vector.
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
    """Return whether the weights are the softmax over the logits of the chosen experts."""
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
    """Return the values [T, E] whose K largest determine the chosen experts."""
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
    """Return ``order_TE`` with -inf for experts outside the best groups. The value of a group is
    the sum of its K // ``best_groups`` largest values (DeepSeek-V3, arXiv:2412.19437), or its
    largest value (DeepSeek-V2)."""
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
            # As in Megatron-LM: not for softmax, and otherwise only with two or more choices.
            normalize = config.moe_router_score_function != "softmax" and experts_TK.shape[1] > 1
        if normalize:
            weights_TK = _normalized(weights_TK)
    factor = config.moe_router_topk_scaling_factor
    return weights_TK if factor is None else weights_TK * factor
