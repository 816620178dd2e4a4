"""Tables of questions and passages, and the search for answers in passages, as in the evaluation of
DPR (Karpukhin et al. 2020, arXiv:2004.04906, section 4.2; facebookresearch/DPR, qa_validation.py).

Shape suffixes: Q questions, K passages per question.
"""

from __future__ import annotations

import ast
import csv
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import regex

from megatron.config import ConfigError

_WORDS = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
HEADER = ["id", "text", "title"]


class EvidencePassage(NamedTuple):
    identity: int
    text: str
    title: str


class EvidenceQuestion(NamedTuple):
    text: str
    answers: Sequence[str]


def words(text: str) -> list[str]:
    """Return the words and punctuation of a text, lower-case, in Unicode's decomposed form."""
    return [word.lower() for word in _WORDS.findall(unicodedata.normalize("NFD", text))]


def has_words(text: str, answers: Sequence[str]) -> bool:
    """Return whether the words of any answer, if it has any, occur consecutively in a text."""
    own = words(text)
    for answer in map(words, answers):
        places = range(len(own) - len(answer) + 1) if answer else ()
        if any(own[place : place + len(answer)] == answer for place in places):
            return True
    return False


def has_match(text: str, answers: Sequence[str]) -> bool:
    """Return whether any answer, a regular expression, matches within a text. A malformed
    expression matches nothing."""
    text, flags = unicodedata.normalize("NFD", text), regex.IGNORECASE | regex.MULTILINE
    for answer in answers:
        try:
            if regex.search(unicodedata.normalize("NFD", answer), text, flags):
                return True
        except regex.error:
            continue
    return False


MATCHERS: dict[str, Callable[[str, Sequence[str]], bool]] = {
    "string": has_words,
    "regex": has_match,
}
"""Functions that return whether a text contains one of the answers, by value of
``--faiss-match``."""


def hits(
    questions: Sequence[EvidenceQuestion],
    found_QK: npt.NDArray[np.int64],
    texts: Sequence[EvidencePassage],
    match: str,
) -> npt.NDArray[np.int64]:
    """Return, for each k from 1 to K, the number of questions that at least one of their first k
    retrieved passages answers, int64 [K]. In ``found_QK``, -1 represents a missing passage."""
    counts, matches = np.zeros(found_QK.shape[1], np.int64), MATCHERS[match]
    for question, numbers in zip(questions, found_QK, strict=True):
        for place, number in enumerate(numbers.tolist()):
            if number >= 0 and matches(texts[number].text, question.answers):
                counts[place:] += 1
                break
    return counts


def read_passages(path: str) -> list[EvidencePassage]:
    """Return the passages in ``--evidence-data-path``. Raises ConfigError, with the line, if the
    file is not a table of passages."""
    rows, passages = _rows("--evidence-data-path", path), list[EvidencePassage]()
    header = next(rows, (1, []))[1]
    if header != HEADER:
        raise ConfigError(
            f"--evidence-data-path {path}: the first line is {header}, and the columns are "
            f"{', '.join(HEADER)}, with tabs between them"
        )
    for line, row in rows:
        if len(row) != len(HEADER) or not row[0].strip().isdecimal():
            raise ConfigError(
                f"--evidence-data-path {path}: line {line} has {len(row)} columns, the first "
                f"{row[0] if row else ''!r:.40}; expected a number, text and title"
            )
        passages.append(EvidencePassage(int(row[0]), row[1], row[2]))
    if not passages:
        raise ConfigError(f"--evidence-data-path {path} has no passages after its first line")
    return passages


def read_questions(flag: str, path: str) -> list[EvidenceQuestion]:
    """Return the questions of a table, with their answers. Raises ConfigError, with the line, if
    the file is not a table of questions."""
    questions = []
    for line, row in _rows(flag, path):
        answers = _answers(row[1]) if len(row) == 2 else None
        if answers is None:
            raise ConfigError(
                f"{flag} {path}: line {line} has {len(row)} columns; expected a question, a tab, "
                "and a list of answers such as ['first', 'second']"
            )
        questions.append(EvidenceQuestion(row[0], answers))
    if not questions:
        raise ConfigError(f"{flag} {path} has no questions")
    return questions


def _answers(text: str) -> list[str] | None:
    try:
        answers = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    strings = isinstance(answers, list) and all(isinstance(each, str) for each in answers)
    return answers if strings and answers else None


def _rows(flag: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a tab-separated table with their line numbers."""
    if not Path(path).is_file():
        raise ConfigError(f"{flag} {path} is not a file")
    csv.field_size_limit(2**30)
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter="\t")
        try:
            for row in reader:
                yield reader.line_num, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{flag} {path}: line {reader.line_num + 1}: {error}") from None
