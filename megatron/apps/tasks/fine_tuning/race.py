"""RACE: folders of text files, each line a passage with questions of four options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.apps.tasks.fine_tuning.examples import (
    RaceQuestion,
    clean_text,
    numbered_lines,
)
from megatron.config import ConfigError
from megatron.features.instruction.columns import RecordFields
from megatron.util.json_text import parse_json

OPTIONS = 4
LETTERS = "ABCD"
"""The names of the options."""
_KEYS = ("article", "questions", "options")
_KNOWN = frozenset((*_KEYS, "answers"))


def read_race(folder: Path) -> list[RaceQuestion]:
    """The questions of all files ``*.txt`` of a folder, in the order of their names. Raises
    ConfigError, with file and line, if something cannot be read."""
    if not folder.is_dir():
        found = "is a file" if folder.is_file() else "does not exist"
        raise ConfigError(f"{folder} {found}; it must be a folder of .txt files")
    files = sorted(folder.glob("*.txt"))
    if not files:
        inside = sorted(child.name for child in folder.iterdir() if child.is_dir())
        hint = f"; name a folder in it: {', '.join(inside[:5])}" if inside else ""
        raise ConfigError(f"{folder} has no .txt file{hint}")
    questions = [
        question
        for path in files
        for number, line in numbered_lines(path)
        if line.strip()
        for question in _questions(path, number, line)
    ]
    if not questions:
        raise ConfigError(f"{folder}: its {len(files)} .txt files have no question")
    return questions


def answered(question: str, option: str) -> str:
    """A question with an option in its blank, or after it where it has none."""
    return clean_text(question.replace("_", option) if "_" in question else f"{question} {option}")


def _questions(path: Path, number: int, line: str) -> list[RaceQuestion]:
    where = f"{path}, line {number}"
    try:
        passage = parse_json(line, where, lenient=True)
    except ValueError as error:
        raise ConfigError(f"{error}; a line has one whole passage") from None
    _check_keys(where, passage)
    article = clean_text(passage["article"])
    texts, options = passage["questions"], passage["options"]
    answers = passage.get("answers")
    counts = {"questions": len(texts), "options": len(options)}
    counts |= {} if answers is None else {"answers": len(answers)}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} {key}" for key, count in counts.items())
        raise ConfigError(f"{where} has {found}: every question needs one of each")
    questions = []
    for index, (text, choices) in enumerate(zip(texts, options, strict=True)):
        of = f"{where}, question {index + 1}"
        if len(choices) != OPTIONS:
            raise ConfigError(f"{of} has {len(choices)} options instead of {OPTIONS}")
        if not all(isinstance(words, str) for words in (text, *choices)):
            raise ConfigError(f"{of}: the question and its options must be strings")
        label = None if answers is None else _answer(of, answers[index])
        identity = f"{path.name}:{number}:{index + 1}"
        questions.append(RaceQuestion(article, text, tuple(choices), label, identity))
    return questions


def _check_keys(where: str, passage: Any) -> None:
    if not isinstance(passage, Mapping):
        raise ConfigError(f"{where} is not a JSON object with article, questions, options, answers")
    for key in _KEYS:
        if key not in passage:
            present = ", ".join(list(passage)[:8]) or "none"
            raise ConfigError(f"{where} has no key {key!r}; its keys: {present}")
    try:
        RecordFields(passage, _KNOWN).check(f"{where}: ", remedy="remove or rename it")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(passage["article"], str):
        raise ConfigError(f"{where}: 'article' must be a string")
    for key in (*_KEYS[1:], *(["answers"] if passage.get("answers") is not None else [])):
        if not isinstance(passage[key], list):
            raise ConfigError(f"{where}: {key!r} must be a list")
    if not all(isinstance(choices, list) for choices in passage["options"]):
        raise ConfigError(f"{where}: 'options' must be a list of lists")


def _answer(of: str, answer: Any) -> int:
    if isinstance(answer, str) and len(answer) == 1 and answer in LETTERS:
        return LETTERS.index(answer)
    raise ConfigError(f"{of} has the answer {answer!r}; it must be one of {', '.join(LETTERS)}")
