"""Exact match and F1 as SQuAD's official scripts compute them (evaluate-v1.1.py, evaluate-v2.0.py).

Numbers are percentages, sums are taken in the order of the questions, so that they are those of the
scripts to the last digit.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))

Metrics = dict[str, float]


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, with one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    return float(normalize_answer(gold) == normalize_answer(predicted))


def f1_score(gold: str, predicted: str) -> float:
    """Of the words that two texts share; 0 if one is empty, as in version 1.1."""
    gold_words, words = normalize_answer(gold).split(), normalize_answer(predicted).split()
    shared = (Counter(gold_words) & Counter(words)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(gold_words)
    return (2 * precision * recall) / (precision + recall)


def f1_score_2(gold: str, predicted: str) -> float:
    """As `f1_score`, but two empty texts agree, as in version 2.0."""
    if not normalize_answer(gold) and not normalize_answer(predicted):
        return 1.0
    return f1_score(gold, predicted)


def squad_metrics(golds: Sequence[Sequence[str]], predicted: Sequence[str]) -> Metrics:
    """``exact_match`` and ``f1`` of version 1.1: each text that is predicted is compared with all
    gold answers of its question, and the best counts."""
    return {
        "exact_match": _mean(_best(golds, predicted, exact_match)),
        "f1": _mean(_best(golds, predicted, f1_score)),
    }


def squad2_metrics(
    golds: Sequence[Sequence[str]],
    predicted: Sequence[str],
    null_odds: Sequence[float] | None = None,
) -> Metrics:
    """``exact``, ``f1`` and ``total`` of version 2.0; of questions with (``HasAns_``) and without
    (``NoAns_``) an answer, those with an empty list of gold answers. An empty text is "no answer".

    ``null_odds`` says for each question how much "no answer" is preferred to the best answer. With
    it there are ``best_exact`` and ``best_f1``, of the best threshold (``_thresh``) above which "no
    answer" would replace a prediction.
    """
    # Gold answers of which normalization leaves nothing do not count; the only answer to what
    # cannot be answered is the empty text.
    kept = [[gold for gold in texts if normalize_answer(gold)] or [""] for texts in golds]
    exact, f1 = _best(kept, predicted, exact_match), _best(kept, predicted, f1_score_2)
    answerable = [bool(texts) for texts in golds]
    result: Metrics = {}
    groups = {"": range(len(golds)), "HasAns_": _where(answerable, True)}
    groups["NoAns_"] = _where(answerable, False)
    for prefix, chosen in groups.items():
        if chosen:
            result[f"{prefix}exact"] = _mean([exact[number] for number in chosen])
            result[f"{prefix}f1"] = _mean([f1[number] for number in chosen])
            result[f"{prefix}total"] = len(chosen)
    if null_odds is not None:
        for name, scores in (("exact", exact), ("f1", f1)):
            best, threshold = _best_threshold(scores, predicted, null_odds, answerable)
            result[f"best_{name}"], result[f"best_{name}_thresh"] = best, threshold
    return result


def _best(
    golds: Sequence[Sequence[str]],
    predicted: Sequence[str],
    score: Callable[[str, str], float],
) -> list[float]:
    pairs = zip(golds, predicted, strict=True)
    return [max(score(gold, text) for gold in texts) for texts, text in pairs]


def _where(values: Sequence[bool], wanted: bool) -> Sequence[int]:
    return [number for number, value in enumerate(values) if value == wanted]


def _mean(scores: Sequence[float]) -> float:
    return 100.0 * sum(scores) / len(scores)


def _best_threshold(
    scores: Sequence[float],
    predicted: Sequence[str],
    null_odds: Sequence[float],
    answerable: Sequence[bool],
) -> tuple[float, float]:
    """The best mean score, and the odds up to which predictions are kept for it."""
    current: float = answerable.count(False)
    best, threshold = current, 0.0
    for number in sorted(range(len(scores)), key=lambda number: null_odds[number]):
        if answerable[number]:
            current += scores[number]
        elif predicted[number]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[number]
    return 100.0 * best / len(scores), threshold
