"""Predictions of n-grams for hidden tokens: the losses that a BERT or T5 has to get below.

The bigram is interpolated by Kneser and Ney's rule, its discount tuned on the last tenth of the
training text. Of a run of hidden tokens it sees the visible token on either side, and computes
exactly what a Markov chain with these transitions knows about the tokens between them. A mask may
be a visible token, replaced or kept (BERT); what that says about the hidden one is used too.

Shape suffixes: V vocabulary, R runs of the same length, K tokens of a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.features.masked.bert import MASKED, RANDOM

Tokens = npt.NDArray[np.int64]
DISCOUNTS = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
CHUNK = 512


@dataclass(frozen=True)
class HiddenText:
    """A text, with which of its tokens are predicted and what is shown in their place.

    Attributes:
        text: all tokens; the first and the last one are visible.
        hidden: positions of the predicted tokens, ascending.
        shown: for each of them the token in its place; None where nothing is shown (T5).
    """

    text: Tokens
    hidden: Tokens
    shown: Tokens | None = None

    def runs(self) -> Iterable[slice]:
        """Predicted tokens next to each other, as slices of ``hidden``."""
        starts = np.flatnonzero(np.diff(self.hidden, prepend=-2) != 1).tolist()
        for start, stop in zip(starts, [*starts[1:], len(self.hidden)], strict=True):
            yield slice(start, stop)


@dataclass(frozen=True)
class Bigram:
    """Probabilities of a token, and of the one after each: float32[V] and float32[V, V]."""

    unigram_V: Tensor
    chain_VV: Tensor
    discount: float

    @classmethod
    def fit(cls, texts: Sequence[Tokens], vocab_size: int) -> Bigram:
        """Counts all texts, with the discount that predicts the last tenth best from the rest."""
        part = len(texts) - max(1, len(texts) // 10)
        rest, last = _counts(texts[:part], vocab_size), _counts(texts[part:], vocab_size)

        def loss(discount: float) -> float:
            chances = _kneser_ney(rest, discount)
            return -float((last * chances.log()).sum() / last.sum())

        discount = min(DISCOUNTS, key=loss)
        counts = _counts(texts, vocab_size)
        ones_V = torch.ones(vocab_size)
        unigram_V = counts.sum(0) + ones_V
        return cls(unigram_V / unigram_V.sum(), _kneser_ney(counts, discount), discount)


def _counts(texts: Sequence[Tokens], size: int) -> Tensor:
    pairs = np.concatenate([text[:-1] * size + text[1:] for text in texts])
    return torch.from_numpy(np.bincount(pairs, minlength=size * size)).view(size, size).float()


def _kneser_ney(counts_VV: Tensor, discount: float) -> Tensor:
    seen_VV = counts_VV > 0
    followers_V = seen_VV.sum(1, keepdim=True)
    # How many tokens one comes after; a half more, so that none is impossible.
    after_V = seen_VV.sum(0) + 0.5
    after_V = after_V / after_V.sum()
    total_V = counts_VV.sum(1, keepdim=True)
    found_VV = (counts_VV - discount).clamp(min=0) + discount * followers_V * after_V
    return torch.where(total_V > 0, found_VV / total_V.clamp(min=1), after_V)


@dataclass(frozen=True)
class TokenLosses:
    """Losses of hidden tokens in the order of their texts, in nats.

    Attributes:
        unigram: without neighbours.
        left: from the visible tokens before it; with ``answers_known`` from the token before it.
        both: from those after it too.
    """

    unigram: npt.NDArray[np.float64]
    left: npt.NDArray[np.float64]
    both: npt.NDArray[np.float64]


def token_losses(
    bigram: Bigram, texts: Sequence[HiddenText], mask: int = -1, answers_known: bool = False
) -> TokenLosses:
    """The losses of a bigram.

    Args:
        bigram: fitted to a training text.
        texts: to be predicted.
        mask: the token that says nothing about the hidden one (BERT).
        answers_known: a token of a run is predicted when those before it are known, and the
            length of the run is known for ``both`` (T5). Otherwise all at once (BERT).
    """
    first = np.cumsum([0, *(len(text.hidden) for text in texts)])
    by_length: dict[int, list[tuple[int, Tokens, Tokens]]] = defaultdict(list)
    for begin, each in zip(first.tolist(), texts, strict=False):
        for run in each.runs():
            places = each.hidden[run]
            known = each.text[[*(places - 1)[:1], *places, *(places + 1)[-1:]]]
            shown = np.full(len(places), mask) if each.shown is None else each.shown[run]
            by_length[len(places)].append((begin + run.start, known, shown))
    result = np.full((3, first[-1]), np.nan)
    predict = _one_by_one if answers_known else _all_at_once
    for length, runs in by_length.items():
        for begin in range(0, len(runs), CHUNK):
            starts, known, shown = zip(*runs[begin : begin + CHUNK], strict=True)
            known_RK = torch.from_numpy(np.stack(known))
            found = predict(bigram, known_RK, torch.from_numpy(np.stack(shown)), mask)
            result[:, np.add.outer(starts, np.arange(length))] = -found.double().log().numpy()
    return TokenLosses(*result)


def _all_at_once(bigram: Bigram, known_RK: Tensor, shown_RK: Tensor, mask: int) -> Tensor:
    """Probabilities of the tokens within ``known_RK``, whose ends are visible: [3, R, K]."""
    answers_RK = known_RK[:, 1:-1]
    length = answers_RK.shape[1]
    evidence = [_evidence(shown_RK[:, k], len(bigram.unigram_V), mask) for k in range(length)]
    after_RV = bigram.chain_VV[:, known_RK[:, -1]].T
    right = [after_RV]
    for k in reversed(range(1, length)):
        after_RV = _normal(evidence[k] * after_RV) @ bigram.chain_VV.T
        right.insert(0, after_RV)
    before_RV = bigram.chain_VV[known_RK[:, 0]]
    found = []
    for k in range(length):
        left_RV = _normal(before_RV * evidence[k])
        chances = (_normal(bigram.unigram_V * evidence[k]), left_RV, _normal(left_RV * right[k]))
        found.append(
            torch.stack([each.gather(1, answers_RK[:, k, None])[:, 0] for each in chances])
        )
        before_RV = left_RV @ bigram.chain_VV
    return torch.stack(found, dim=-1)


def _one_by_one(bigram: Bigram, known_RK: Tensor, shown_RK: Tensor, mask: int) -> Tensor:
    """As :func:`_all_at_once`, each token from those before it, all of which are known."""
    answers_RK = known_RK[:, 1:-1]
    length = answers_RK.shape[1]
    after_RV = bigram.chain_VV[:, known_RK[:, -1]].T
    found: list[Tensor] = []
    for k in reversed(range(length)):
        chosen_R = answers_RK[:, k, None]
        left_RV = bigram.chain_VV[known_RK[:, k]]
        both_RV = _normal(left_RV * after_RV)
        unigram_R = bigram.unigram_V[answers_RK[:, k]]
        chances = (unigram_R, left_RV.gather(1, chosen_R)[:, 0], both_RV.gather(1, chosen_R)[:, 0])
        found.insert(0, torch.stack(chances))
        after_RV = _normal(after_RV @ bigram.chain_VV.T)
    return torch.stack(found, dim=-1)


def _evidence(shown_R: Tensor, vocab_size: int, mask: int) -> Tensor:
    """Chances of what is shown given each hidden token, up to a factor."""
    evidence_RV = torch.ones(len(shown_R), vocab_size)
    replaced = shown_R != mask
    evidence_RV[replaced] = RANDOM / vocab_size
    rows = torch.nonzero(replaced)[:, 0]
    evidence_RV[rows, shown_R[replaced]] += 1 - MASKED - RANDOM
    return evidence_RV


def _normal(values_RV: Tensor) -> Tensor:
    return values_RV / values_RV.sum(1, keepdim=True)
