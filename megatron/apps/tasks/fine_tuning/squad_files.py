"""SQuAD 1.1 and 2.0: questions from the JSON files, and the metrics of the official scripts.

Metrics are those of evaluate-v1.1.py and evaluate-v2.0.py, in percent. Sums are taken in the order
of the questions, so that results match the scripts to the last digit.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron.features.instruction.columns import RecordFields
from megatron.util.json_text import parse_json

_LAYOUT = (
    'SQuAD\'s layout is {"version": "1.1", "data": [{"title": "...", "paragraphs": [{"context": '
    '"...", "qas": [{"id": "...", "question": "...", "answers": [{"text": "...", "answer_start": '
    "0}]}]}]}]}"
)
_KEYS = {
    "the file": ("version", "data"),
    "an article": ("title", "paragraphs"),
    "a paragraph": ("context", "qas"),
    "a question": ("question", "answers", "is_impossible", "plausible_answers"),
    "an answer": ("text", "answer_start"),
}
_KINDS = {list: "a list", str: "a string", int: "an integer"}
_TOLERANCE = 2
"""Number of characters by which ``answer_start`` may be off; published files have such errors."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


@dataclass(frozen=True)
class GoldAnswer:
    """A gold answer: ``text`` is ``context[start : start + len(text)]``."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """Question about a text. An empty ``answers`` means that the text does not contain the answer.
    ``file`` is the file it was read from, for messages."""

    identity: str
    question: str
    context: str
    answers: tuple[GoldAnswer, ...]
    file: str = "a file"


def read_questions(path: str | Path, with_negative: bool) -> list[Question]:
    """Return the questions of a file, in order. With ``with_negative``, questions may have no
    answer (version 2.0).

    Raises FileNotFoundError if the file does not exist, and ValueError if it is not SQuAD's JSON,
    if a question has no answer (unless ``with_negative``), or if an answer is not within
    ``_TOLERANCE`` characters of its ``answer_start``. The message contains the file, the question
    and the remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"SQuAD file {path} does not exist; give a JSON file such as train-v1.1.json"
        )
    try:
        content = parse_json(path.read_bytes(), str(path), lenient=True)
    except ValueError as error:
        raise ValueError(f"{error}; {_LAYOUT}") from None
    reader = _Reader(path, with_negative)
    questions = list(reader.questions(content))
    if not questions:
        raise ValueError(f"{path} contains no questions; {_LAYOUT}")
    if reader.moved:
        logging.getLogger(__name__).warning(
            "%s: %d answers begin up to %d characters from their answer_start and were found there "
            "(the first: question %s)", path, len(reader.moved), _TOLERANCE, reader.moved[0],
        )  # fmt: skip
    return questions


class _Reader:
    """Reader of SQuAD's JSON that checks the content. ``moved`` collects the ids of questions whose
    ``answer_start`` is off."""

    def __init__(self, path: Path, with_negative: bool) -> None:
        self._path, self._with_negative = path, with_negative
        self._identities: set[str] = set()
        self.moved: list[str] = []

    def questions(self, content: Any) -> Iterator[Question]:
        articles = self._value(content, "data", list, "the file")
        self._check_keys(content, "the file", "the file")
        for number, article in enumerate(articles, 1):
            title = article.get("title") if isinstance(article, dict) else None
            named = f"article {number}" + (f" ({title})" if title else "")
            paragraphs = self._value(article, "paragraphs", list, named)
            self._check_keys(article, "an article", named)
            for place, paragraph in enumerate(paragraphs, 1):
                where = f"{named}, paragraph {place}"
                context = self._value(paragraph, "context", str, where)
                self._check_keys(paragraph, "a paragraph", where)
                for qa in self._value(paragraph, "qas", list, where):
                    yield self._question(qa, context, where)

    def _question(self, qa: Any, context: str, where: str) -> Question:
        identity = self._value(qa, "id", str, f"a question of {where}")
        where = f"question {identity}"
        if identity in self._identities:
            self._fail(f"{where} occurs twice; every id must be of one question")
        self._identities.add(identity)
        text = self._value(qa, "question", str, where)
        self._check_keys(qa, "a question", where)
        answers = tuple(
            self._answer(answer, context, identity)
            for answer in self._value(qa, "answers", list, where)
        )
        if qa.get("is_impossible") and answers:
            self._fail(f"{where} has answers and is_impossible is true; remove one of them")
        if not answers and not self._with_negative:
            self._fail(
                f"{where} has no answer; give --version-2-with-negative for questions that cannot "
                "be answered (SQuAD 2.0), or remove the question"
            )
        return Question(identity, text, context, answers, str(self._path))

    def _answer(self, answer: Any, context: str, identity: str) -> GoldAnswer:
        where = f"an answer of question {identity}"
        text = self._value(answer, "text", str, where)
        start = self._value(answer, "answer_start", int, where)
        self._check_keys(answer, "an answer", where)
        if not text.strip():
            self._fail(
                f"{where} has no text; a question without an answer has an empty list of answers"
            )
        for distance in range(_TOLERANCE + 1):
            for begin in (start - distance, start + distance):
                if begin >= 0 and context.startswith(text, begin):
                    if distance:
                        self.moved.append(identity)
                    return GoldAnswer(text, begin)
        self._fail(
            f"question {identity}: the context has {context[max(start, 0) :][: len(text)]!r} at "
            f"answer_start {start}, and not the answer {text!r}; correct answer_start (it counts "
            "characters), or remove the question"
        )

    def _check_keys(self, mapping: dict[str, Any], kind: str, where: str) -> None:
        try:
            known = RecordFields(mapping, frozenset(_KEYS[kind]))
            known.check(f"{where}: ", remedy="remove or rename it")
        except ValueError as error:
            self._fail(str(error))

    def _value(self, mapping: Any, key: str, kind: type, where: str) -> Any:
        value = mapping.get(key) if isinstance(mapping, dict) else None
        if not isinstance(value, kind):
            problem = "is missing" if value is None else f"is {value!r:.60}"
            self._fail(f"{where}: {key!r} {problem} and must be {_KINDS[kind]}; {_LAYOUT}")
        return value

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self._path}: {problem}")


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and English articles, and with
    single spaces between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    return float(normalize_answer(gold) == normalize_answer(predicted))


def f1_score(gold: str, predicted: str) -> float:
    """Compute the F1 score of the words that two texts share. The score is 0 if one text is empty,
    as in version 1.1."""
    gold_words, words = normalize_answer(gold).split(), normalize_answer(predicted).split()
    shared = (Counter(gold_words) & Counter(words)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(words), shared / len(gold_words)
    return (2 * precision * recall) / (precision + recall)


def f1_score_2(gold: str, predicted: str) -> float:
    """Compute `f1_score`, but return 1 for two empty texts, as in version 2.0."""
    if not normalize_answer(gold) and not normalize_answer(predicted):
        return 1.0
    return f1_score(gold, predicted)


def squad_metrics(golds: Sequence[Sequence[str]], predicted: Sequence[str]) -> dict[str, float]:
    """Compute ``exact_match`` and ``f1`` of version 1.1. Each predicted text is compared with all
    gold answers to its question, and the best score counts."""
    return {
        "exact_match": _mean(_best(golds, predicted, exact_match)),
        "f1": _mean(_best(golds, predicted, f1_score)),
    }


def squad2_metrics(
    golds: Sequence[Sequence[str]],
    predicted: Sequence[str],
    null_odds: Sequence[float] | None = None,
) -> dict[str, float]:
    """Compute ``exact``, ``f1`` and ``total`` of version 2.0, over all questions and separately for
    questions with an answer (``HasAns_``) and without one (``NoAns_``, an empty list of gold
    answers).

    An empty predicted text means "no answer". ``null_odds`` contains, for each question, the score
    of "no answer" minus that of the best answer. If it is given, the result also contains
    ``best_exact`` and ``best_f1``: the best scores that a threshold on ``null_odds`` can give,
    above which predictions are replaced by "no answer". The keys with ``_thresh`` contain the
    thresholds.
    """
    # Ignore gold answers that are empty after normalization. If no answer remains, the only correct
    # prediction is the empty text.
    kept = [[gold for gold in texts if normalize_answer(gold)] or [""] for texts in golds]
    exact, f1 = _best(kept, predicted, exact_match), _best(kept, predicted, f1_score_2)
    groups = {
        "": range(len(golds)),
        "HasAns_": [number for number, texts in enumerate(golds) if texts],
        "NoAns_": [number for number, texts in enumerate(golds) if not texts],
    }
    result: dict[str, float] = {}
    for prefix, numbers in groups.items():
        if numbers:
            result[f"{prefix}exact"] = _mean([exact[number] for number in numbers])
            result[f"{prefix}f1"] = _mean([f1[number] for number in numbers])
            result[f"{prefix}total"] = len(numbers)
    if null_odds is not None:
        for name, scores in (("exact", exact), ("f1", f1)):
            best, threshold = _best_threshold(scores, golds, predicted, null_odds)
            result[f"best_{name}"], result[f"best_{name}_thresh"] = best, threshold
    return result


def _best(
    golds: Sequence[Sequence[str]], predicted: Sequence[str], score: Callable[[str, str], float]
) -> list[float]:
    pairs = zip(golds, predicted, strict=True)
    return [max(score(gold, text) for gold in texts) for texts, text in pairs]


def _mean(scores: Sequence[float]) -> float:
    return 100.0 * sum(scores) / len(scores)


def _best_threshold(
    scores: Sequence[float],
    golds: Sequence[Sequence[str]],
    predicted: Sequence[str],
    null_odds: Sequence[float],
) -> tuple[float, float]:
    """Return the best mean score in percent, and the threshold on ``null_odds`` that gives it:
    predictions whose odds exceed the threshold become "no answer"."""
    current: float = sum(not texts for texts in golds)
    best, threshold = current, 0.0
    for number in sorted(range(len(scores)), key=lambda number: null_odds[number]):
        if golds[number]:
            current += scores[number]
        elif predicted[number]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[number]
    return 100.0 * best / len(scores), threshold
