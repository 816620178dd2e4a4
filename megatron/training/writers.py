"""Outputs for metrics: a JSON-lines file, and the outputs that features add.

One process of a run creates the writers. On a resume each writer drops what an earlier process
wrote past the resumed step, which would otherwise be plotted twice.

Once a run has begun or is resumed, a writer that fails, for example on a full disk, does not end
the run. It warns once, and again at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging as log
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.config.features import features
from megatron.config.output import LoggingConfig
from megatron.training.registry import WrittenTexts
from megatron.util.files import replacing, sync
from megatron.util.json_text import parse_json

Values = Mapping[str, float | None]
"""Values by name, as in :mod:`megatron.training.registry` and ``Reported`` evaluations."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of a JSON-lines metrics file."""
STEP = "step"
"""Kind of rows with the values of a single step, by tag, for TensorBoard only."""

logger = log.getLogger(__name__)


class Writer(Protocol):
    """Writes the values of steps to an output."""

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        """Write the values of one step. Missing values and None are left out or written as null.
        ``kind`` is ``train``, ``validation`` or ``test`` (validation and test are followed by the
        data set's name if there are several), ``task`` followed by the task's name, ``STEP``, or an
        event such as ``resume``, whose values may be empty."""
        ...

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        """Write the texts that the model generated after one step."""
        ...

    def close(self) -> None:
        """Write buffered values, and close the output."""
        ...


class RunWriter(Writer, Protocol):
    """Writer for a whole run. Its methods do not raise errors."""

    def went_back(self, iteration: int, samples: int) -> None:
        """Drop the rows of later steps, as on a resume. The same process continues after
        ``iteration`` steps, possibly 0, and ``samples`` samples."""
        ...


class TeeWriter:
    """Passes all values and texts to several writers."""

    def __init__(self, writers: Sequence[RunWriter]) -> None:
        self._writers = tuple(writers)

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        for writer in self._writers:
            writer.scalars(kind, step, values, samples=samples, tokens=tokens)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        for writer in self._writers:
            writer.texts(written, samples=samples, tokens=tokens)

    def went_back(self, iteration: int, samples: int) -> None:
        for writer in self._writers:
            writer.went_back(iteration, samples)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def build_writers(
    logging: LoggingConfig,
    *,
    resume_iteration: int = 0,
    resume_samples: int = 0,
    configuration: Mapping[str, Any] | None = None,
) -> TeeWriter:
    """Return the writers that ``logging`` selects. On a resume, they continue after the loaded
    checkpoint's iteration and samples. Trackers show ``configuration``, without secrets. Raises
    ValueError or OSError if a new run's tracker is not installed or does not start, or if its file
    is not writable."""
    writers: list[RunWriter] = []
    if logging.metrics_file is not None:
        try:
            writers.append(JsonLinesWriter(Path(logging.metrics_file), resume_iteration))
        except OSError as error:
            from megatron.engine.saving import cannot_write

            raise cannot_write(logging.metrics_file, error, "--metrics-file") from error
    for feature in features().values():
        writers += feature.writers(logging, configuration or {}, resume_iteration, resume_samples)
    return TeeWriter(writers)


_START_OF_ROW = b'{"kind"'
_MOST_LINES_WITHOUT_ROW = 100
_MOST_BYTES_OF_LINE = 1 << 16
_MOST_WAITING = 64 << 20
"""Maximum size in bytes of the rows that wait in memory for free disk space."""


class JsonLinesWriter:
    """Writes one JSON object per line: ``kind``, ``iteration``, ``consumed_samples``,
    ``consumed_tokens`` and the values. NaN and infinity, which JSON lacks, are written as null. A
    resumed run appends to the file. It first drops the rows past the resumed iteration, if the file
    can be rewritten. A new run moves an existing file to ``NAME.1`` or the next free number. Raises
    ValueError if the existing file is not a metrics file."""

    def __init__(self, path: Path, resume_iteration: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():  # not for /dev/null or a pipe
            _check_rows(path)
            if resume_iteration > 0:
                with _rows_may_stay(path, resume_iteration):
                    _drop_rows_past(path, resume_iteration)
            else:
                _set_aside(path)
        self._path = path
        # Unbuffered, so that rows that do not fit on a full disk stay in _waiting.
        self._file = path.open("ab", buffering=0)
        self._waiting = bytearray()
        self._lost = 0
        self._warned = False

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        if kind != STEP:
            row = {name: _json_number(value) for name, value in values.items()}
            self._add(kind, step, samples, tokens, row)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        """Write a row of kind ``text`` for each text."""
        for text in written.texts:
            self._add("text", written.iteration, samples, tokens, text._asdict())

    def _add(
        self, kind: str, step: int, samples: int, tokens: int, values: Mapping[str, Any]
    ) -> None:
        row: dict[str, Any] = {
            "kind": kind,
            "iteration": step,
            "consumed_samples": samples,
            "consumed_tokens": tokens,
            **values,
        }
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        if len(self._waiting) + len(line) > _MOST_WAITING:
            self._lost += 1
            return
        self._waiting += line
        self._write()

    def went_back(self, iteration: int, samples: int) -> None:
        with _rows_may_stay(self._path, iteration):
            self._write_waiting()
            if self._path.is_file():
                _drop_rows_past(self._path, iteration)
                self._reopen()

    def close(self) -> None:
        self._write()
        lost = self._lost + self._waiting.count(b"\n")
        if lost:
            logger.warning("%s: %d rows are missing", self._path, lost)
        try:
            self._file.close()
        except OSError as error:
            self._warn(error)

    def _write(self) -> None:
        """Write only whole lines, so that readers find no others, even after a kill. A full disk
        must not end a run: the rows wait in memory until there is space again."""
        try:
            self._write_waiting()
        except OSError as error:
            self._warn(error)

    def _write_waiting(self) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._reopen()
            logger.warning("%s was deleted while it was written: a new one begins here", self._path)
        while self._waiting:
            written = self._file.write(self._waiting)
            del self._waiting[:written]

    def _reopen(self) -> None:
        before, self._file = self._file, self._path.open("ab", buffering=0)
        before.close()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            text = "%s: %s; training continues, and the rows wait in memory"
            logger.warning(text, self._path, error.strerror)
        self._warned = True


def _json_number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check_rows(path: Path) -> None:
    """Raise ValueError, and leave the file unchanged, if it has no rows of metrics."""
    with path.open("rb") as file:
        if not file.peek(1):
            return
        for _ in range(_MOST_LINES_WITHOUT_ROW):
            line = file.readline(_MOST_BYTES_OF_LINE)
            if not line:
                break
            # A power failure may have left an incomplete row or zeros.
            if line.startswith(_START_OF_ROW) or _START_OF_ROW.startswith(line.strip(b"\0")):
                return
    raise ValueError(
        f"--metrics-file {path}: the file exists and has no rows of metrics; it is not touched: "
        "name another"
    )


@contextlib.contextmanager
def _rows_may_stay(path: Path, iteration: int) -> Iterator[None]:
    """Only warn if :func:`_drop_rows_past` fails: old rows must not end a resumed run."""
    try:
        yield
    except OSError as error:
        logger.warning(
            "%s: rows past iteration %d cannot be dropped (%s): they stay, and the new ones follow "
            "after them",
            path,
            iteration,
            error.strerror,
        )


def _drop_rows_past(path: Path, iteration: int) -> None:
    """Rewrite ``path`` without rows past ``iteration`` and without incomplete lines."""
    with replacing(path) as part, path.open("rb") as old, part.open("wb") as new:
        for number, line in enumerate(old, start=1):
            try:
                row = json.loads(line)
                kind, at = row["kind"], int(row["iteration"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                logger.warning("%s: dropped broken line %d", path, number)
                continue
            # A resume at the same step replaces the row of an earlier resume.
            if at < iteration or (at == iteration and kind != "resume"):
                new.write(line.rstrip(b"\n") + b"\n")
        sync(new)


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a run's JSON-lines metrics file. Raises FileNotFoundError if it does not
    exist, and ValueError if a line is not a valid row."""
    rows = []
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            # A process that still runs or was killed may have left an incomplete last line.
            if not line.endswith(b"\n"):
                break
            where = f"{path}, line {number}"
            row = parse_json(line, where)
            if not _is_row(row):
                raise ValueError(f"{where} is not a row of metrics: a kind, and numbers by name")
            rows.append(row)
    return rows


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return False
    if row["kind"].partition(" ")[0] not in ("train", "validation", "task"):
        return True
    numbers = (value for name, value in row.items() if name != "kind")
    counted = isinstance(row.get("consumed_tokens"), int)
    return counted and all(value is None or isinstance(value, int | float) for value in numbers)
