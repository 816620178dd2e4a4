"""Tasks whose data are tables: the columns of GLUE's files, their labels and metrics.

Columns count from 0 and are divided by tabs; quotes have no meaning. Test files have other columns
and no labels: they are recognised by their first line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.apps.tasks.fine_tuning.examples import (
    LabelledExample,
    clean_text,
    numbered_lines,
)
from megatron.config import ConfigError

_SHOWN = 3
_WORDS_SHOWN = 60


@dataclass(frozen=True)
class TableColumns:
    """Where the values of a row are.

    Attributes:
        width: columns of a row. Rows of another number are left out; without ``exact`` any row
            with at least as many is read.
        label: column of the label, -1 for the last; None in a test file.
        identity: column of the row's own number or name; None for the number of the line.
    """

    width: int
    texts: tuple[int, ...]
    label: int | None
    identity: int | None = 0
    header: bool = True
    exact: bool = True


@dataclass(frozen=True)
class TableTask:
    """A task with one table per file.

    Attributes:
        labels: the words in the files, by the number of the label; none where a number is
            predicted.
        metric: by which epochs are compared; see :mod:`megatron.apps.tasks.fine_tuning.metrics`.
        bounds: lowest and highest number that can be predicted.
    """

    name: str
    labels: tuple[str, ...]
    train: TableColumns
    test: TableColumns
    metric: str = "accuracy"
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def texts(self) -> int:
        """Texts of a row."""
        return len(self.train.texts)

    def read(self, path: Path) -> list[LabelledExample]:
        """The rows of a file; a warning counts those of a wrong width or with an empty text. Raises
        ConfigError, with the line, if a label is unknown, or nothing can be read."""
        lines = list(numbered_lines(path))
        columns = self._columns(path, lines)
        examples, skipped = [], list[tuple[int, str]]()
        for number, line in lines[1:] if columns.header else lines:
            row = line.split("\t")
            if not line.strip():
                continue
            reason = self._unreadable(columns, row)
            if reason is None:
                examples.append(self._example(path, number, columns, row))
            elif columns.exact:
                skipped.append((number, reason))
            else:
                raise ConfigError(f"{path}, line {number}: {reason}; {self._wanted(columns)}")
        self._report(path, columns, examples, skipped)
        return examples

    def _columns(self, path: Path, lines: Sequence[tuple[int, str]]) -> TableColumns:
        if not any(line.strip() for _, line in lines):
            raise ConfigError(f"{path} is empty; {self._wanted(self.train)}")
        first = lines[0][1].split("\t")
        test = self.test
        if len(first) == test.width and (
            test.width != self.train.width or first[0].strip().lower() == "index"
        ):
            return test
        columns = self.train
        if columns.header and len(first) >= columns.width and self._labelled(columns, first):
            raise ConfigError(
                f"{path}, line 1 has the label {first[columns.label or 0].strip()!r} and would be "
                "left out: the first line must name the columns"
            )
        return columns

    def _labelled(self, columns: TableColumns, row: Sequence[str]) -> bool:
        assert columns.label is not None
        word = row[columns.label].strip()
        return word in self.labels if self.labels else _is_number(word)

    def _unreadable(self, columns: TableColumns, row: Sequence[str]) -> str | None:
        """Why a row cannot be an example, if so."""
        if len(row) != columns.width and (columns.exact or len(row) < columns.width):
            return f"{len(row)} columns instead of {columns.width}"
        for column in columns.texts:
            if not row[column].strip():
                return f"column {column} (from 0), a text, is empty"
        return None

    def _example(
        self, path: Path, number: int, columns: TableColumns, row: Sequence[str]
    ) -> LabelledExample:
        texts = tuple(clean_text(row[column].strip()) for column in columns.texts)
        named = None if columns.identity is None else row[columns.identity].strip()
        label = None if columns.label is None else self._label(path, number, row[columns.label])
        return LabelledExample(texts, label, str(number) if named is None else named)

    def _label(self, path: Path, number: int, word: str) -> int | float:
        word = word.strip()
        if self.labels:
            if word in self.labels:
                return self.labels.index(word)
            raise ConfigError(
                f"{path}, line {number}: the label is {_cut(word)!r}; {self.name}'s are "
                f"{', '.join(self.labels)}: correct the line, or check that --task and file match"
            )
        lowest, highest = self.bounds
        if _is_number(word) and lowest <= float(word) <= highest:
            return float(word)
        raise ConfigError(
            f"{path}, line {number}: the label is {_cut(word)!r}; {self.name}'s are numbers from "
            f"{lowest:g} to {highest:g}: correct the line, or check that --task and file match"
        )

    def _report(
        self,
        path: Path,
        columns: TableColumns,
        examples: Sequence[LabelledExample],
        skipped: Sequence[tuple[int, str]],
    ) -> None:
        if not examples:
            found = " has no row"
            if skipped:
                found = f", line {skipped[0][0]}: {skipped[0][1]}"
            raise ConfigError(f"{path}{found}; {self._wanted(columns)}")
        if skipped:
            shown = "; ".join(f"line {number}: {reason}" for number, reason in skipped[:_SHOWN])
            more = f"; {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
            count = "1 row is" if len(skipped) == 1 else f"{len(skipped)} rows are"
            logging.getLogger(__name__).warning("%s: %s left out: %s%s", path, count, shown, more)

    def _wanted(self, columns: TableColumns) -> str:
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


def _cut(word: str) -> str:
    return word if len(word) <= _WORDS_SHOWN else word[:_WORDS_SHOWN] + "..."


_ENTAILMENT = ("entailment", "not_entailment")
_YES_NO = ("0", "1")

TABLES: dict[str, TableTask] = {
    task.name: task
    for task in (
        TableTask(
            "MNLI",
            ("contradiction", "entailment", "neutral"),
            # Files have 12 or 16 columns, as many as people labelled a row.
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
"""The tasks of GLUE by the name in ``--task``."""
