"""Examples of the GLUE tables and of RACE, as stored in the files of each task.

Tables are tab-separated. Their columns count from 0, and quotes have no special meaning. Test files
have different columns and no labels; the first line tells which kind a file is.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.features.instruction.columns import RecordFields
from megatron.util.json_text import parse_json

OPTIONS = 4
LETTERS = ("A", "B", "C", "D")
"""Letters of the four options of a RACE question."""
_RACE_KEYS = ("article", "questions", "options")
_SHOWN, _LABEL_SHOWN = 3, 60


@dataclass(frozen=True)
class LabelledExample:
    """Text or pair of texts with its label: the index of a class, the number to be predicted, or
    None in a test file. ``identity`` is the id under which the prediction is written."""

    texts: tuple[str, ...]
    label: int | float | None
    identity: str


@dataclass(frozen=True)
class RaceQuestion:
    """Question about an article, with its options. ``label`` is the index of the correct option, or
    None in a test file."""

    article: str
    question: str
    options: tuple[str, ...]
    label: int | None
    identity: str


def clean_text(text: str) -> str:
    """Replace each run of white space by one space, and remove the space before a separate full
    stop."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):
        text = text.replace(" . ", ". ")
    return text


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1. Only a line feed ends a line. Raises
    ConfigError if the path is not a file or is not UTF-8 text."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {problem}; it must be a file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{path}, line {number} is not UTF-8 text ({error.reason}): convert the file"
                ) from None
            yield number, text.rstrip("\r\n")


@dataclass(frozen=True)
class TableColumns:
    """Columns of a table. ``width`` is the number of columns, a minimum unless ``exact``. The other
    fields are the indices of the texts, the label and the row's id. ``label`` is -1 for the last
    column and None in a test file. ``identity`` is None to use the line number as id."""

    width: int
    texts: tuple[int, ...]
    label: int | None
    identity: int | None = 0
    header: bool = True
    exact: bool = True

    def reason_against(self, row: Sequence[str]) -> str | None:
        """Return the reason why a row cannot be used as an example, or None if it can."""
        if len(row) != self.width and (self.exact or len(row) < self.width):
            return f"{len(row)} columns instead of {self.width}"
        for column in self.texts:
            if not row[column].strip():
                return f"column {column} (from 0), a text, is empty"
        return None


@dataclass(frozen=True)
class TableTask:
    """Task with one table per file. ``labels`` contains the label words in the files, or is empty
    if the label is a number within ``bounds``. ``metric`` is a key of
    :data:`megatron.apps.tasks.fine_tuning.scores.SCORERS`."""

    name: str
    labels: tuple[str, ...]
    train: TableColumns
    test: TableColumns
    metric: str = "accuracy"
    bounds: tuple[float, float] = (-math.inf, math.inf)
    folders = False

    @property
    def texts(self) -> int:
        """Number of texts in a row, 1 or 2."""
        return len(self.train.texts)

    def read(self, path: Path) -> list[LabelledExample]:
        """Read the rows of a file. Rows with the wrong width or an empty text are skipped, and a
        warning counts them; if the width is only a minimum, they are errors. Raises ConfigError,
        with the line number, if a label is unknown or no row can be read."""
        lines = list(numbered_lines(path))
        columns = self._columns(path, lines)
        examples, skipped = [], []
        for number, line in lines[1:] if columns.header else lines:
            row = line.split("\t")
            if not line.strip():
                continue
            reason = columns.reason_against(row)
            if reason is None:
                examples.append(self._example(path, number, columns, row))
            elif columns.exact:
                skipped.append(f"line {number}: {reason}")
            else:
                raise ConfigError(f"{path}, line {number}: {reason}; {self._expected(columns)}")
        if not examples:
            problem = f", {skipped[0]}" if skipped else " has no row"
            raise ConfigError(f"{path}{problem}; {self._expected(columns)}")
        if skipped:
            more = f"; {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
            count = "1 row is" if len(skipped) == 1 else f"{len(skipped)} rows are"
            shown = "; ".join(skipped[:_SHOWN])
            logging.getLogger(__name__).warning("%s: %s left out: %s%s", path, count, shown, more)
        return examples

    def _columns(self, path: Path, lines: Sequence[tuple[int, str]]) -> TableColumns:
        if not any(line.strip() for _, line in lines):
            raise ConfigError(f"{path} is empty; {self._expected(self.train)}")
        first, test, train = lines[0][1].split("\t"), self.test, self.train
        if len(first) == test.width and (
            test.width != train.width or first[0].strip().lower() == "index"
        ):
            return test
        if train.header and len(first) >= train.width:
            word = first[train.label or 0].strip()
            if word in self.labels if self.labels else _is_number(word):
                raise ConfigError(
                    f"{path}, line 1 has the label {word!r} and would be left out: the first line "
                    "must name the columns"
                )
        return train

    def _example(
        self, path: Path, number: int, columns: TableColumns, row: Sequence[str]
    ) -> LabelledExample:
        texts = tuple(clean_text(row[column].strip()) for column in columns.texts)
        identity = str(number) if columns.identity is None else row[columns.identity].strip()
        if columns.label is None:
            return LabelledExample(texts, None, identity)
        word = row[columns.label].strip()
        if word in self.labels:
            return LabelledExample(texts, self.labels.index(word), identity)
        lowest, highest = self.bounds
        if not self.labels and _is_number(word) and lowest <= float(word) <= highest:
            return LabelledExample(texts, float(word), identity)
        known = ", ".join(self.labels) or f"numbers from {lowest:g} to {highest:g}"
        shown = word if len(word) <= _LABEL_SHOWN else word[:_LABEL_SHOWN] + "..."
        raise ConfigError(
            f"{path}, line {number}: the label is {shown!r}; {self.name}'s are {known}: correct "
            "the line, or check that --task and file match"
        )

    def _expected(self, columns: TableColumns) -> str:
        texts = " and ".join(map(str, columns.texts))
        label = "the last" if columns.label == -1 else columns.label
        words = "" if label is None else f", the label in {label}"
        header = "" if columns.header else ", and no line with the names of the columns"
        least = "" if columns.exact else "at least "
        return (
            f"a file of {self.name} has {least}{columns.width} columns divided by tabs, texts in "
            f"{texts} (from 0){words}{header}"
        )


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


_ENTAILMENT = ("entailment", "not_entailment")
_YES_NO = ("0", "1")

TABLES: dict[str, TableTask] = {
    task.name: task
    for task in (
        TableTask(
            "MNLI",
            ("contradiction", "entailment", "neutral"),
            # The number of columns depends on the number of annotators' labels per row: 12 or 16.
            TableColumns(11, (8, 9), -1, exact=False),
            TableColumns(10, (8, 9), None, exact=False),
        ),
        TableTask("QQP", _YES_NO, TableColumns(6, (3, 4), 5), TableColumns(3, (1, 2), None)),
        TableTask("QNLI", _ENTAILMENT, TableColumns(4, (1, 2), -1), TableColumns(3, (1, 2), None)),
        TableTask(
            "SST-2", _YES_NO, TableColumns(2, (0,), 1, identity=None), TableColumns(2, (1,), None)
        ),
        TableTask(
            "CoLA",
            _YES_NO,
            TableColumns(4, (3,), 1, identity=None, header=False),
            TableColumns(2, (1,), None),
            metric="matthews",
        ),
        TableTask(
            "STS-B",
            (),
            TableColumns(10, (7, 8), -1),
            TableColumns(9, (7, 8), None),
            metric="correlation",
            bounds=(0.0, 5.0),
        ),
        TableTask(
            "MRPC",
            _YES_NO,
            TableColumns(5, (3, 4), 0, identity=None),
            TableColumns(5, (3, 4), None),
        ),
        TableTask("RTE", _ENTAILMENT, TableColumns(4, (1, 2), -1), TableColumns(3, (1, 2), None)),
    )
}
"""GLUE tasks by their name in ``--task``."""


class RaceTask:
    """RACE: folders of text files, in which each line is a passage with four-option questions."""

    name, labels, metric, folders = "RACE", LETTERS, "accuracy", True

    def read(self, path: Path) -> list[RaceQuestion]:
        return read_race(path)


RACE = RaceTask()


def read_race(folder: Path) -> list[RaceQuestion]:
    """Return the questions in all ``*.txt`` files of a folder, sorted by file name. Raises
    ConfigError, with file and line, if a file cannot be read, or if the files contain no
    question."""
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else "does not exist"
        raise ConfigError(f"{folder} {problem}; it must be a folder of .txt files")
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
        for question in _race_questions(path, number, line)
    ]
    if not questions:
        raise ConfigError(f"{folder}: its {len(files)} .txt files have no question")
    return questions


def answered(question: str, option: str) -> str:
    """Return a question with an option filled into its blank, or appended if it has no blank."""
    return clean_text(question.replace("_", option) if "_" in question else f"{question} {option}")


def _race_questions(path: Path, number: int, line: str) -> list[RaceQuestion]:
    where = f"{path}, line {number}"
    try:
        passage = parse_json(line, where, lenient=True)
    except ValueError as error:
        raise ConfigError(f"{error}; a line has one whole passage") from None
    _check_passage(where, passage)
    article = clean_text(passage["article"])
    texts, options, answers = passage["questions"], passage["options"], passage.get("answers")
    counts = {"questions": len(texts), "options": len(options)}
    counts |= {} if answers is None else {"answers": len(answers)}
    if len(set(counts.values())) > 1:
        counted = ", ".join(f"{count} {key}" for key, count in counts.items())
        raise ConfigError(f"{where} has {counted}: every question needs one of each")
    questions = []
    for index, (text, choices) in enumerate(zip(texts, options, strict=True)):
        place = f"{where}, question {index + 1}"
        if len(choices) != OPTIONS:
            raise ConfigError(f"{place} has {len(choices)} options instead of {OPTIONS}")
        if not all(isinstance(words, str) for words in (text, *choices)):
            raise ConfigError(f"{place}: the question and its options must be strings")
        if answers is not None and answers[index] not in LETTERS:
            raise ConfigError(
                f"{place} has the answer {answers[index]!r}; it must be one of {', '.join(LETTERS)}"
            )
        label = None if answers is None else LETTERS.index(answers[index])
        identity = f"{path.name}:{number}:{index + 1}"
        questions.append(RaceQuestion(article, text, tuple(choices), label, identity))
    return questions


def _check_passage(where: str, passage: Any) -> None:
    if not isinstance(passage, Mapping):
        raise ConfigError(f"{where} is not a JSON object with article, questions, options, answers")
    for key in _RACE_KEYS:
        if key not in passage:
            present = ", ".join(list(passage)[:8]) or "none"
            raise ConfigError(f"{where} has no key {key!r}; its keys: {present}")
    try:
        known = frozenset((*_RACE_KEYS, "answers"))
        RecordFields(passage, known).check(f"{where}: ", remedy="remove or rename it")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(passage["article"], str):
        raise ConfigError(f"{where}: 'article' must be a string")
    for key in (*_RACE_KEYS[1:], *(["answers"] if passage.get("answers") is not None else [])):
        if not isinstance(passage[key], list):
            raise ConfigError(f"{where}: {key!r} must be a list")
    if not all(isinstance(choices, list) for choices in passage["options"]):
        raise ConfigError(f"{where}: 'options' must be a list of lists")
