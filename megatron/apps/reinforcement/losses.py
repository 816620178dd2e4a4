"""Losses of completions, computed from the log-probabilities of their tokens, and the metrics that
are reported along with them under trl's names.

Shapes: B completions of a micro batch, S positions of their tokens, N pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.apps.reinforcement.flags import ReinforcementConfig

POLICY_LOSS, KL_LOSS, VALUE_LOSS, DPO_LOSS = (
    "policy loss", "kl loss", "value loss", "online dpo loss",
)  # fmt: skip
ENTROPY, KL = "entropy", "kl"
CLIPPED_LOW, CLIPPED_HIGH, CLIPPED = (
    "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
)  # fmt: skip
SAMPLING_KL, SAMPLING_DIFFERENCE = SAMPLING = "sampling/kl", "sampling/logp_difference"
"""Divergence (k3) between the distributions in sampling and in training, and mean absolute
difference of log-probabilities, which is 0 only if all are bitwise equal."""
PAIRS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Metrics of pairs, also reported by ``--preference dpo``."""


class DrawnTokens(NamedTuple):
    """Sampled tokens of a micro batch, [B, S] each, float32 or float64.

    Attributes:
        log_probs_BS: log-probabilities under the current weights, with a gradient; 0 for tokens
            that are not in the loss.
        entropies_BS: entropies of the tokens' distributions, with a gradient.
        mask_BS: 1 for tokens in the loss, else 0.
        advantages_BS: advantages of the tokens.
        old_BS: log-probabilities under the weights before the first step on these completions.
        sampled_BS: log-probabilities when the tokens were sampled.
        reference_BS: log-probabilities under the reference model; None without one.
        share: number of tokens in the loss, divided by its mean over all micro batches of the step
            on all ranks; a scalar.
    """

    log_probs_BS: Tensor
    entropies_BS: Tensor
    mask_BS: Tensor
    advantages_BS: Tensor
    old_BS: Tensor
    sampled_BS: Tensor
    reference_BS: Tensor | None
    share: Tensor

    def mean(self, values_BS: Tensor) -> Tensor:
        """Return a micro batch's contribution to the mean over the tokens of a step. Averaged over
        micro batches and ranks, the contributions give the mean over all tokens."""
        total = (values_BS * self.mask_BS).sum() / self.mask_BS.sum().clamp(min=1.0)
        return total * self.share


def loss_weights(options: ReinforcementConfig) -> dict[str, float]:
    """Return the names of the losses and metrics, with their weights in the total loss. Metrics
    have the weight 0."""
    if options.rl == "online-dpo":
        return {DPO_LOSS: 1.0} | dict.fromkeys((*PAIRS, KL, ENTROPY, *SAMPLING), 0.0)
    weights = {POLICY_LOSS: 1.0, ENTROPY: -options.entropy_coef}
    if options.needs_reference:
        assert options.beta is not None
        if options.kl_in == "loss":
            weights[KL_LOSS] = options.beta
        weights[KL] = 0.0
    if options.has_values:
        weights[VALUE_LOSS] = options.vf_coef
    return weights | dict.fromkeys((CLIPPED_LOW, CLIPPED_HIGH, CLIPPED, *SAMPLING), 0.0)


def policy_losses(options: ReinforcementConfig, tokens: DrawnTokens) -> dict[str, Tensor]:
    """Return the losses and metrics of :func:`loss_weights`, except the value loss and the metrics
    of :data:`SAMPLING`."""
    ratio = importance_ratio(options, tokens)
    terms_BS, *clipped = _policy_terms(options, tokens, ratio)
    if options.off_policy_mask_threshold is not None:
        terms_BS = terms_BS * _near_enough(options.off_policy_mask_threshold, tokens)
    if options.importance_sampling_correction != "none":
        terms_BS = terms_BS * correction(options, tokens)
    losses = {POLICY_LOSS: aggregated(options, terms_BS, tokens)}
    losses[ENTROPY] = tokens.mean(tokens.entropies_BS)
    if tokens.reference_BS is not None:
        estimate_BS = divergence(tokens.log_probs_BS, tokens.reference_BS, options.kl_estimator)
        losses[KL] = tokens.mean(estimate_BS)
        if options.use_bias_correction_kl:
            estimate_BS = estimate_BS * ratio
        losses[KL_LOSS] = aggregated(options, estimate_BS, tokens)
    low, high = clipped
    parts = low, high, torch.maximum(low, high)
    for name, part in zip((CLIPPED_LOW, CLIPPED_HIGH, CLIPPED), parts, strict=True):
        losses[name] = tokens.mean(part.expand_as(tokens.mask_BS))
    return {
        name: losses[name] if weight else losses[name].detach()
        for name, weight in loss_weights(options).items()
        if name in losses
    }


def sampling_numbers(tokens: DrawnTokens) -> dict[str, Tensor]:
    """Return the metrics of :data:`SAMPLING`."""
    log_probs_BS = tokens.log_probs_BS.detach()
    kl_BS = divergence(tokens.sampled_BS, log_probs_BS, "k3")
    difference_BS = (log_probs_BS - tokens.sampled_BS).abs()
    return dict(zip(SAMPLING, map(tokens.mean, (kl_BS, difference_BS)), strict=True))


def importance_ratio(options: ReinforcementConfig, tokens: DrawnTokens) -> Tensor:
    """Return the ratio of current to old probabilities: [B, S], or [B, 1] for one ratio per
    completion (see ``--importance-sampling-level``). For the rloo loss it is the product over all
    tokens of a completion."""
    mask_BS = tokens.mask_BS
    log_ratio_BS = (tokens.log_probs_BS - tokens.old_BS) * mask_BS
    if options.loss_type == "rloo":
        return log_ratio_BS.sum(1, keepdim=True).exp()
    if options.importance_sampling_level == "token":
        return log_ratio_BS.exp()
    mean_B1 = log_ratio_BS.sum(1, keepdim=True) / mask_BS.sum(1, keepdim=True).clamp(min=1.0)
    if options.importance_sampling_level == "sequence":
        return mean_B1.exp()
    own_BS = tokens.log_probs_BS
    return (mean_B1.detach() + own_BS - own_BS.detach()).exp()


def _policy_terms(
    options: ReinforcementConfig, tokens: DrawnTokens, ratio: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each token, [B, S], and indicators of the ratios that were clipped from
    below and from above, [B, S] or [B, 1]."""
    advantages_BS = tokens.advantages_BS
    low, high = options.clip_from
    if options.loss_type == "cispo":
        # Chen et al. 2025 (arXiv:2506.13585), equation 4: only the weight is clipped, so that every
        # token keeps its gradient.
        terms_BS = -ratio.clamp(max=high).detach() * advantages_BS * tokens.log_probs_BS
        above_BS = (ratio > high) & (advantages_BS > 0)
        below_BS = torch.zeros_like(above_BS)
    else:
        # Schulman et al. 2017 (arXiv:1707.06347), equation 7, with the upper bound of INTELLECT-2
        # (arXiv:2505.07291), section 3.4.
        bounded = ratio if options.delta is None else ratio.clamp(max=options.delta)
        clipped = ratio.clamp(1 - low, 1 + high)
        terms_BS = -torch.min(bounded * advantages_BS, clipped * advantages_BS)
        below_BS = (bounded < 1 - low) & (advantages_BS < 0)
        above_BS = (bounded > 1 + high) & (advantages_BS > 0)
    kind = tokens.mask_BS.dtype
    return terms_BS, below_BS.to(kind), above_BS.to(kind)


def aggregated(options: ReinforcementConfig, terms_BS: Tensor, tokens: DrawnTokens) -> Tensor:
    """Return the loss of a micro batch, given the terms of its tokens, according to
    ``--loss-type``. Averaged over micro batches and ranks, it is the loss of the step."""
    mask_BS = tokens.mask_BS
    # with rloo, all tokens of a completion have the same term
    if options.loss_type in ("grpo", "rloo"):
        return _mean_of_texts(terms_BS, mask_BS).mean()
    if options.loss_type == "dr_grpo":
        return (terms_BS * mask_BS).sum() / (len(mask_BS) * options.max_completion_length)
    mean = (terms_BS * mask_BS).sum() / mask_BS.sum().clamp(min=1.0)
    return mean if options.loss_type == "bnpo" else mean * tokens.share


def _mean_of_texts(terms_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Return the mean of each completion's terms, [B]."""
    return (terms_BS * mask_BS).sum(1) / mask_BS.sum(1).clamp(min=1.0)


def divergence(log_probs_BS: Tensor, reference_BS: Tensor, estimator: str | None) -> Tensor:
    """Estimate KL(policy || reference) at each token, [B, S] (Schulman 2020, "Approximating KL
    divergence"): k1 is the log-ratio, k2 half of its square, and k3 an estimate that is never
    negative."""
    ratio_BS = log_probs_BS - reference_BS
    if estimator == "k1":
        return ratio_BS
    if estimator == "k2":
        return ratio_BS.square() / 2
    return torch.exp(-ratio_BS) + ratio_BS - 1


def correction(options: ReinforcementConfig, tokens: DrawnTokens) -> Tensor:
    """Return the importance weight, [B, S] or [B, 1], that corrects for sampling with other
    probabilities than the old ones (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"), according to ``--importance-sampling-correction``."""
    level, limit = (options.importance_sampling_correction or "").split("_")
    log_ratio = (tokens.old_BS - tokens.sampled_BS) * tokens.mask_BS
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    low, high = options.importance_sampling_clip_min, options.importance_sampling_clip_max
    if limit == "truncate":
        return ratio.clamp(low, high)
    outside = ratio > high if low is None else (ratio > high) | (ratio < low)
    return ratio.masked_fill(outside, 0.0)


def _near_enough(threshold: float, tokens: DrawnTokens) -> Tensor:
    """Return the mask [B, S] of tokens to keep: 1 for tokens with a non-negative advantage, and for
    completions whose mean log-probability has fallen by at most ``threshold`` since sampling
    (DeepSeek-V3.2, arXiv:2512.02556, equation 9)."""
    mask_BS = tokens.mask_BS
    fallen_BS = (tokens.sampled_BS - tokens.log_probs_BS.detach()) * mask_BS
    mean_B1 = fallen_BS.sum(1, keepdim=True) / mask_BS.sum(1, keepdim=True).clamp(min=1.0)
    return ((tokens.advantages_BS >= 0) | (mean_B1 <= threshold)).to(mask_BS.dtype)


def value_loss(
    options: ReinforcementConfig,
    values_BS: Tensor,
    returns_BS: Tensor,
    old_BS: Tensor,
    mask_BS: Tensor,
    share: Tensor,
) -> Tensor:
    """Return a micro batch's contribution to the value loss of a step. The loss is half of the
    squared error of the values, or of the values clipped to a range around the old ones if that
    error is larger (as in OpenAI's baselines, ppo2)."""
    near_BS = old_BS + (values_BS - old_BS).clamp(-options.cliprange_value, options.cliprange_value)
    errors = ((each - returns_BS).square() for each in (values_BS, near_BS))
    total = (torch.maximum(*errors) * mask_BS).sum() / 2
    return total / mask_BS.sum().clamp(min=1.0) * share


def pair_losses(
    options: ReinforcementConfig, tokens: DrawnTokens, better_N: Tensor
) -> dict[str, Tensor]:
    """Return the losses and metrics of :func:`loss_weights` for pairs of consecutive
    completions, except those of :data:`SAMPLING`.

    ``better_N`` is the index in the pair, 0 or 1, of the better completion. This is Guo et al.
    2024 (arXiv:2402.04792), with the losses of Rafailov et al. 2023 (sigmoid) or Azar et al.
    2023 (ipo)."""
    assert tokens.reference_BS is not None and options.beta is not None
    mask_BS = tokens.mask_BS
    ratio_BS = (tokens.log_probs_BS - tokens.reference_BS) * mask_BS
    ratio_N2 = ratio_BS.sum(1).view(-1, 2)
    places_N2 = torch.stack((better_N, 1 - better_N), dim=1)
    better_N, worse_N = ratio_N2.gather(1, places_N2).unbind(1)
    # Exclude pairs in which a completion has no token in the loss.
    counted_N = (mask_BS.sum(1).view(-1, 2) > 0).all(1).to(ratio_BS.dtype)
    margin_N = better_N - worse_N
    if options.loss_type == "ipo":
        loss_N = (margin_N - 1 / (2 * options.beta)).square()
    else:
        loss_N = -F.logsigmoid(options.beta * margin_N)
    seen = [options.beta * each.detach() for each in (better_N, worse_N, margin_N)]
    seen.append((seen[2] > 0).to(margin_N.dtype))
    reported = {name: each.mean() for name, each in zip(PAIRS, seen, strict=True)}
    losses = {DPO_LOSS: (loss_N * counted_N).mean(), **reported}
    losses[KL] = tokens.mean(ratio_BS.detach())
    losses[ENTROPY] = tokens.mean(tokens.entropies_BS.detach())
    return losses
