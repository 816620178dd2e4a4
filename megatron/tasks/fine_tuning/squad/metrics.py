"""Exact match and F1 as SQuAD's official scripts compute them (evaluate-v1.1.py, evaluate-v2.0.py).

Numbers are percentages, sums are taken in the order of the questions, so that they are those of the
scripts to the last digit.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from megatron.tasks.fine_tuning.squad.questions import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))

Scores = dict[str, float]


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


def squad_metrics(questions: Sequence[Question], predictions: Mapping[str, str]) -> Scores:
    """``exact_match`` and ``f1`` of version 1.1: each prediction is compared with all gold answers
    of its question, and the best counts."""
    exact = _best(questions, predictions, exact_match, _texts)
    f1 = _best(questions, predictions, f1_score, _texts)
    return {"exact_match": _mean(exact, list(exact)), "f1": _mean(f1, list(f1))}


def squad2_metrics(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
) -> Scores:
    """``exact``, ``f1`` and ``total`` of version 2.0; of questions with (``HasAns_``) and without
    an answer (``NoAns_``).

    ``null_odds`` says, by question, how much "no answer" is preferred to the best answer. With it
    there are ``best_exact`` and ``best_f1``, of the best threshold (``_thresh``) above which "no
    answer" would replace a prediction.
    """
    exact = _best(questions, predictions, exact_match, _answers_2)
    f1 = _best(questions, predictions, f1_score_2, _answers_2)
    answerable = {question.identity: bool(question.answers) for question in questions}
    result: Scores = {}
    groups = {
        "": list(answerable),
        "HasAns_": [identity for identity, has in answerable.items() if has],
        "NoAns_": [identity for identity, has in answerable.items() if not has],
    }
    for prefix, identities in groups.items():
        if identities:
            result[f"{prefix}exact"] = _mean(exact, identities)
            result[f"{prefix}f1"] = _mean(f1, identities)
            result[f"{prefix}total"] = len(identities)
    if null_odds is not None:
        for name, scores in (("exact", exact), ("f1", f1)):
            best, threshold = _best_threshold(scores, predictions, null_odds, answerable)
            result[f"best_{name}"], result[f"best_{name}_thresh"] = best, threshold
    return result


def _best(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    score: Callable[[str, str], float],
    answers: Callable[[Question], list[str]],
) -> Scores:
    return {
        question.identity: max(
            score(gold, predictions[question.identity]) for gold in answers(question)
        )
        for question in questions
    }


def _texts(question: Question) -> list[str]:
    return [answer.text for answer in question.answers]


def _answers_2(question: Question) -> list[str]:
    """Version 2.0 leaves out gold answers of which normalization leaves nothing; the only answer to
    what cannot be answered is the empty text."""
    return [text for text in _texts(question) if normalize_answer(text)] or [""]


def _mean(scores: Scores, identities: Sequence[str]) -> float:
    return 100.0 * sum(scores[identity] for identity in identities) / len(identities)


def _best_threshold(
    scores: Scores,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    answerable: Mapping[str, bool],
) -> tuple[float, float]:
    """The best mean score, and the odds up to which predictions are kept for it."""
    current: float = sum(not has for has in answerable.values())
    best, threshold = current, 0.0
    for identity in sorted(null_odds, key=lambda identity: null_odds[identity]):
        if answerable[identity]:
            current += scores[identity]
        elif predictions[identity]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[identity]
    return 100.0 * best / len(scores), threshold
