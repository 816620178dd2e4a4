"""Losses of preferences, from the log-probabilities of answers, and the numbers that are reported
next to them, by the names that trl gives them.

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
"""Reported for kto: the reference point, an estimate of the divergence from the reference, in
nats."""
MARGINS, ACCURACIES = "rewards/margins", "rewards/accuracies"
PAIRS = (
    "rewards/chosen", "rewards/rejected", MARGINS, ACCURACIES, "logps/chosen", "logps/rejected",
)  # fmt: skip
"""Reported for pairs: means over the pairs of the rewards of the better and of the worse answer,
of their difference, of whether the better one has the larger reward, and of the log-probabilities
that the rewards are made of."""


class Answers(NamedTuple):
    """Log-probabilities of the answers of a micro batch; a row each, [R].

    Attributes:
        log_prob_R: log-probability of the answer, given its prompt.
        tokens_R: tokens of the answer.
        reference_R: its log-probability under the reference model, or None.
        text_log_prob_R: log-probability of the text in the cross entropy: the answer, or the prompt
            too.
        text_tokens_R: tokens of that.
        desirable_R: whether an answer that is judged alone is good; None for pairs.
    """

    log_prob_R: Tensor
    tokens_R: Tensor
    reference_R: Tensor | None
    text_log_prob_R: Tensor
    text_tokens_R: Tensor
    desirable_R: Tensor | None = None

    @property
    def log_ratio_R(self) -> Tensor:
        """log(p / p of the reference)."""
        assert self.reference_R is not None
        return self.log_prob_R - self.reference_R


Loss = Callable[[PreferenceConfig, Answers], dict[str, Tensor]]


def loss_weights(options: PreferenceConfig) -> dict[str, float]:
    """The names of a loss and of what is reported next to it, with their weights in the number that
    is minimised."""
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
    """Rafailov et al. 2023, equation 7; with label smoothing Mitchell 2023 (conservative DPO)."""
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
    """Azar et al. 2023, equation 17, where ``beta`` is tau, of means over the tokens of an answer,
    with which the paper's results were computed."""
    ratio_R = answers.log_ratio_R
    margin_N = _margin(ratio_R / answers.tokens_R)
    return {
        "ipo loss": (margin_N - 1 / (2 * options.beta)).square().mean(),
        **_cross_entropy(options, answers),
        **_reported(options.beta * ratio_R, answers.log_prob_R),
    }


def simpo(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Meng et al. 2024, equation 6."""
    mean_R = answers.log_prob_R / answers.tokens_R
    logit_N = options.beta * _margin(mean_R) - options.simpo_gamma
    return {
        "simpo loss": -F.logsigmoid(logit_N).mean(),
        **_cross_entropy(options, answers),
        **_reported(options.beta * mean_R, mean_R),
    }


def orpo(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Hong et al. 2024, equations 6 and 7: the odds of an answer are the odds of the geometric mean
    of its tokens' probabilities."""
    mean_R = answers.log_prob_R / answers.tokens_R
    log_odds_N = _margin(mean_R - _log_of_rest(mean_R))
    return {
        **_cross_entropy_of_better(answers),
        ODDS_RATIO_LOSS: -F.logsigmoid(log_odds_N).mean(),
        **_reported(options.beta * mean_R, mean_R),
    }


def kto(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    """Ethayarajh et al. 2024, equations 7 and 8. The first row of each two is a judged answer, the
    second the same prompt with another's answer: from these comes the reference point, which has no
    gradient."""
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
"""By the names of ``--preference``; each gives the numbers of :func:`loss_weights`."""


def _margin(values_R: Tensor) -> Tensor:
    """The value of the better answer minus the value of the worse, [N]."""
    return values_R[0::2] - values_R[1::2]


def _log_of_rest(log_p: Tensor) -> Tensor:
    """log(1 - p), in the one of its two forms that avoids cancellation (Maechler 2012)."""
    near_one = log_p > -0.6931471805599453
    # Each form gets an argument for which its gradient is finite.
    of_small = torch.log1p(-log_p.masked_fill(near_one, -1.0).exp())
    of_large = torch.log(-torch.expm1(log_p.masked_fill(~near_one, -0.5)))
    return torch.where(near_one, of_large, of_small)


def _cross_entropy(options: PreferenceConfig, answers: Answers) -> dict[str, Tensor]:
    return _cross_entropy_of_better(answers) if options.preference_sft_weight else {}


def _cross_entropy_of_better(answers: Answers) -> dict[str, Tensor]:
    """The mean over all tokens."""
    total = answers.text_log_prob_R[0::2].sum()
    return {LM_LOSS: -total / answers.text_tokens_R[0::2].sum()}


def _reported(reward_R: Tensor, log_prob_R: Tensor) -> dict[str, Tensor]:
    """The numbers of :data:`PAIRS`."""
    reward_R, log_prob_R = reward_R.detach(), log_prob_R.detach()
    better_N, worse_N = reward_R[0::2], reward_R[1::2]
    numbers = (
        better_N, worse_N, better_N - worse_N, (better_N > worse_N).to(reward_R.dtype),
        log_prob_R[0::2], log_prob_R[1::2],
    )  # fmt: skip
    return {name: each.mean() for name, each in zip(PAIRS, numbers, strict=True)}
