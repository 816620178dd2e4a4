"""Log-probabilities as requests get them.

Shapes: R rows, T targets, K most probable tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.inference.request import TokenScore
from megatron.inference.step import TargetScores


def scores_of_targets(targets: Sequence[int], scores: TargetScores) -> list[TokenScore]:
    """Those that a model computed of the targets of a part."""
    return [
        TokenScore(token, logprob, tuple(zip(top, top_logprobs, strict=True)))
        for token, logprob, top, top_logprobs in zip(
            targets,
            scores.logprobs.tolist(),
            scores.top_tokens.tolist(),
            scores.top_logprobs.tolist(),
            strict=True,
        )
    ]


def scores_of_tokens(
    logits_RV: Tensor, tokens: Sequence[int], tops: Sequence[int]
) -> list[TokenScore]:
    """The score of a token of each row, with ``tops`` most probable ones. A row's do not depend on
    the others."""
    if not tokens:
        return []
    # In float32 a sum over the vocabulary would lose a digit.
    log_probs_RV = logits_RV.double().log_softmax(-1)
    tokens_R1 = torch.tensor(tokens, device=logits_RV.device).unsqueeze(1)
    log_probs_RK, top_RK = log_probs_RV.topk(max(tops), -1)
    found = TargetScores(
        log_probs_RV.gather(1, tokens_R1)[:, 0].float(), top_RK, log_probs_RK.float()
    )
    return [
        TokenScore(score.token, score.logprob, score.top[:count])
        for score, count in zip(scores_of_targets(tokens, found), tops, strict=True)
    ]
