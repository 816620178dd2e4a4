"""SQuAD's JSON, versions 1.1 and 2.0, as the questions that it contains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron.features.instruction.columns import RecordFields
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)

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
_TOLERANCE = 2
"""Characters by which published files are wrong in places about where an answer begins."""


@dataclass(frozen=True)
class GoldAnswer:
    """A gold answer: ``text`` is ``context[start : start + len(text)]``."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a text; without answers it cannot be answered from the text. ``file`` is
    where it was read."""

    identity: str
    question: str
    context: str
    answers: tuple[GoldAnswer, ...]
    file: str = "a file"


def read_questions(path: str | Path, with_negative: bool) -> list[Question]:
    """The questions of a file in its order. ``with_negative``: some may have no answer (2.0).

    Raises FileNotFoundError, and ValueError for a file that is not SQuAD's JSON, a question without
    an answer (unless ``with_negative``), and an answer that is not where the file says; the message
    names the file, the question and what to do.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"SQuAD file {path} does not exist; give a JSON file such as train-v1.1.json"
        )
    reader = _Reader(path, with_negative)
    found = list(reader.questions(_content(path)))
    if not found:
        raise ValueError(f"{path} contains no questions; {_LAYOUT}")
    if reader.moved:
        logger.warning(
            "%s: %d answers begin up to %d characters from their answer_start and were found there "
            "(the first: question %s)", path, len(reader.moved), _TOLERANCE, reader.moved[0],
        )  # fmt: skip
    return found


def _content(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes(), str(path), lenient=True)
    except ValueError as error:
        raise ValueError(f"{error}; {_LAYOUT}") from None


class _Reader:
    """Checks a file while it is read."""

    def __init__(self, path: Path, with_negative: bool) -> None:
        self._path, self._with_negative = path, with_negative
        self._identities: set[str] = set()
        self.moved: list[str] = []

    def questions(self, content: Any) -> Iterator[Question]:
        articles = self._list(content, "data", "the file")
        self._check_keys(content, "the file", "the file")
        for number, article in enumerate(articles, 1):
            title = article.get("title") if isinstance(article, dict) else None
            named = f"article {number}" + (f" ({title})" if title else "")
            paragraphs = self._list(article, "paragraphs", named)
            self._check_keys(article, "an article", named)
            for place, paragraph in enumerate(paragraphs, 1):
                where = f"{named}, paragraph {place}"
                context = self._value(paragraph, "context", str, where)
                self._check_keys(paragraph, "a paragraph", where)
                for qa in self._list(paragraph, "qas", where):
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
            self._answer(answer, context, identity) for answer in self._list(qa, "answers", where)
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

    def _list(self, mapping: Any, key: str, where: str) -> list[Any]:
        return self._value(mapping, key, list, where)

    def _value(self, mapping: Any, key: str, wanted: type, where: str) -> Any:
        value = mapping.get(key) if isinstance(mapping, dict) else None
        if not isinstance(value, wanted):
            kind = {list: "a list", str: "a string", int: "an integer"}[wanted]
            found = "is missing" if value is None else f"is {value!r:.60}"
            self._fail(f"{where}: {key!r} {found} and must be {kind}; {_LAYOUT}")
        return value

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self._path}: {problem}")
