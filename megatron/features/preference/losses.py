"""Preference losses, computed from the log-probabilities of answers, and metrics that are reported
with them under trl's names.

Shapes: R rows of a micro batch, two for each sample; N samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.features.preference.flags import PreferenceConfig
from megatron.model.embedding import LM_LOSS

ODDS_RATIO_LOSS = "odds ratio loss"
KL = "rewards/kl"
"""Metric of kto: its reference point, an estimate of the KL divergence from the reference model in
nats."""
MARGINS, ACCURACIES = "rewards/margins", "rewards/accuracies"
PAIRS = (
    "rewards/chosen", "rewards/rejected", MARGINS, ACCURACIES, "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Metrics of pairs, as means over pairs: reward of the better answer, reward of the worse answer,
their difference, the share of pairs whose better answer has the larger reward, and the
log-probabilities from which the two rewards are computed."""


class Answers(NamedTuple):
    """Log-probabilities of the answers of a micro batch, one for each row.

    Attributes:
        log_prob_R: log-probability of the answer, given its prompt.
        tokens_R: number of tokens of the answer.
        reference_R: log-probability of the answer under the reference model, or None.
        text_log_prob_R: log-probability of the text in the cross entropy: the answer, or for orpo
            prompt and answer.
        text_tokens_R: number of tokens of that text.
        desirable_R: True if a judged answer is good; None for pairs.
    """

    log_prob_R: Tensor
    tokens_R: Tensor
    reference_R: Tensor | None
    text_log_prob_R: Tensor
    text_tokens_R: Tensor
    desirable_R: Tensor | None = None

    @property
    def log_ratio_R(self) -> Tensor:
        """Logarithm of the ratio of the model's probability to the reference model's."""
        assert self.reference_R is not None
        return self.log_prob_R - self.reference_R


Loss = Callable[[PreferenceConfig, Answers], dict[str, Tensor]]


def loss_weights(options: PreferenceConfig) -> dict[str, float]:
    """Return the terms and metrics of the chosen loss, with their weights in the sum."""
    name = options.preference
    if name == "orpo":
        return {LM_LOSS: 1.0, ODDS_RATIO_LOSS: options.beta} | dict.fromkeys(PAIRS, 0.0)
    weights = {f"{name} loss": 1.0}
    if name == "kto":
        return weights | dict.fromkeys((MARGINS, ACCURACIES, KL), 0.0)
    if options.preference_sft_weight:
        weights[LM_LOSS] = options.preference_sft_weight
    return weights | dict.fromkeys(PAIRS, 0.0)


def dpo(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Compute the loss of Rafailov et al. 2023, equation 7. Label smoothing follows Mitchell 2023
    (conservative DPO)."""
    ratio_R = answers.log_ratio_R
    compared_R = ratio_R
    if options.preference_average_log_prob:
        compared_R = ratio_R / answers.tokens_R
    logit_N = options.beta * _margin(compared_R)
    wrong = options.preference_label_smoothing
    loss_N = -(1 - wrong) * F.logsigmoid(logit_N) - wrong * F.logsigmoid(-logit_N)
    return {
        "dpo loss": loss_N.mean(),
        **_cross_entropy(options, answers),
        **_reported(options.beta * ratio_R, answers.log_prob_R),
    }


def ipo(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Compute the loss of Azar et al. 2023, equation 17, with ``beta`` as tau. Like the paper's
    experiments, it uses means over the tokens of an answer."""
    ratio_R = answers.log_ratio_R
    margin_N = _margin(ratio_R / answers.tokens_R)
    return {
        "ipo loss": (margin_N - 1 / (2 * options.beta)).square().mean(),
        **_cross_entropy(options, answers),
        **_reported(options.beta * ratio_R, answers.log_prob_R),
    }


def simpo(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Compute the loss of Meng et al. 2024, equation 6."""
    mean_R = answers.log_prob_R / answers.tokens_R
    logit_N = options.beta * _margin(mean_R) - options.simpo_gamma
    return {
        "simpo loss": -F.logsigmoid(logit_N).mean(),
        **_cross_entropy(options, answers),
        **_reported(options.beta * mean_R, mean_R),
    }


def orpo(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Compute the loss of Hong et al. 2024, equations 6 and 7. The odds of an answer are those of
    the geometric mean of its tokens' probabilities."""
    mean_R = answers.log_prob_R / answers.tokens_R
    log_odds_N = _margin(mean_R - _log_of_rest(mean_R))
    return {
        **_cross_entropy_of_better(answers),
        ODDS_RATIO_LOSS: -F.logsigmoid(log_odds_N).mean(),
        **_reported(options.beta * mean_R, mean_R),
    }


def kto(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Compute the loss of Ethayarajh et al. 2024, equations 7 and 8. Rows alternate: a judged
    answer, then the same prompt with the answer to another prompt. The latter rows give the
    reference point, which has no gradient."""
    assert answers.desirable_R is not None
    ratio_N, other_N = answers.log_ratio_R[0::2], answers.log_ratio_R[1::2].detach()
    kl = other_N.mean().clamp(min=0)
    good_N = answers.desirable_R[0::2]
    sign_N = torch.where(good_N, 1.0, -1.0).to(ratio_N.dtype)
    weight_N = torch.where(good_N, options.kto_desirable_weight, options.kto_undesirable_weight).to(
        ratio_N.dtype
    )
    margin_N = sign_N * options.beta * (ratio_N - kl)
    seen_N = margin_N.detach()
    return {
        "kto loss": (weight_N * (1 - torch.sigmoid(margin_N))).mean(),
        MARGINS: seen_N.mean(),
        ACCURACIES: (seen_N > 0).to(seen_N.dtype).mean(),
        KL: kl,
    }


LOSSES: dict[str, Loss] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo, "kto": kto}
"""Functions by value of ``--preference``. Each returns the terms of :func:`loss_weights`."""


def _margin(values_R: Tensor) -> Tensor:
    """Return the differences between better and worse answers, [N]."""
    return values_R[0::2] - values_R[1::2]


def _log_of_rest(log_p: Tensor) -> Tensor:
    """Return log(1 - p), in the form that avoids cancellation for each value (Maechler 2012)."""
    near_one = log_p > -0.6931471805599453
    # Replace arguments at which the gradient of the unused form would not be finite.
    of_small = torch.log1p(-log_p.masked_fill(near_one, -1.0).exp())
    of_large = torch.log(-torch.expm1(log_p.masked_fill(~near_one, -0.5)))
    return torch.where(near_one, of_large, of_small)


def _cross_entropy(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    return _cross_entropy_of_better(answers) if options.preference_sft_weight else {}


def _cross_entropy_of_better(answers: Answers) -> dict[str, Tensor]:
    """Return the cross entropy of the better answers, as a mean over all their tokens."""
    total = answers.text_log_prob_R[0::2].sum()
    return {LM_LOSS: -total / answers.text_tokens_R[0::2].sum()}


def _reported(reward_R: Tensor, log_prob_R: Tensor) -> dict[str, Tensor]:
    """Return the metrics named in :data:`PAIRS`."""
    reward_R, log_prob_R = reward_R.detach(), log_prob_R.detach()
    better_N, worse_N = reward_R[0::2], reward_R[1::2]
    numbers = (
        better_N, worse_N, better_N - worse_N, (better_N > worse_N).to(reward_R.dtype),
        log_prob_R[0::2], log_prob_R[1::2],
    )  # fmt: skip
    return {name: each.mean() for name, each in zip(PAIRS, numbers, strict=True)}
