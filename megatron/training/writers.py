"""Where metrics go: a JSON-lines file, and the programs for experiments in ``trackers``.

One process of a run builds the writers. On a resume each of them drops what an earlier process
reported past the resumed step, which would otherwise be drawn twice.

Once a run has begun no writer ends it, nor a run that is resumed: where one fails, as on a full
disk, that is said once, and again at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging as log
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

from megatron.config.output import LoggingConfig
from megatron.training.metrics import WrittenTexts
from megatron.util.files import replacing, sync

Values = Mapping[str, float | None]
"""Values by the names of :mod:`megatron.training.registry` and of what is ``Reported``."""

TRACKER = "megatron.features.trackers.{}:open_writer"
"""Makes the writer of a tracker, imported for runs with it only: a function of the flags, the
configuration, and the iteration and number of samples before what it gets."""
SECRETS = "megatron.util.secrets:without_secrets"
"""Imported for runs with trackers, which must not get passwords."""

STEP = "step"
"""Kind of the values of a single step, by their tags, for TensorBoard only."""


class Writer(Protocol):
    """Receives the values of steps."""

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        """Writes the values of one step; None and absent values are left out or written as null.
        ``kind`` is ``train``, ``validation``, ``test`` (the latter two followed by the name of the
        data set, where there are several), ``task`` and the name of the task, ``STEP``, or an event
        such as ``resume``, whose values may be empty."""
        ...

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        """Writes what the model wrote at one step."""
        ...

    def close(self) -> None:
        """Writes what is buffered."""
        ...


class RunWriter(Writer, Protocol):
    """A writer of a whole run, whose methods raise nothing."""

    def went_back(self, iteration: int, samples: int) -> None:
        """Drops what was reported of later steps, as at a resume: the same process continues after
        an earlier iteration, which may be 0, and number of samples."""
        ...


@runtime_checkable
class _TakesLater(Protocol):
    """A writer that has what it is given in memory; the last step that is out of it, if any is."""

    taken: int | None


class TeeWriter:
    """Passes everything to several writers."""

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


class LastingWriter:
    """Passes everything to a writer that may fail, and tries to open another one a minute later.

    Args:
        name: of what is written, for messages.
        open: makes a writer; its arguments are the last iteration and number of samples before what
            it gets. The first one's errors are raised, but those of a run that is resumed are not.
        iteration: the last before the run; above 0 in a run that is resumed.
        samples: consumed before the run.
        pause: seconds after a failure until the next attempt.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[int, int], Writer],
        iteration: int = 0,
        samples: int = 0,
        pause: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._open, self._pause, self._clock = name, open, pause, clock
        self._writer: Writer | None = None
        self._written = iteration, samples
        self._begun = iteration
        self._failures: list[str] = []
        self._retry_at = 0.0
        try:
            self._writer = open(iteration, samples)
        except Exception as error:
            if not iteration:
                raise
            self._failed(error)

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        self._pass(
            step, samples, lambda to: to.scalars(kind, step, values, samples=samples, tokens=tokens)
        )

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        step = written.iteration
        self._pass(step, samples, lambda to: to.texts(written, samples=samples, tokens=tokens))

    def went_back(self, iteration: int, samples: int) -> None:
        """Closes the writer, and opens another one, which drops the later steps."""
        self._close()
        self._written = iteration, samples
        try:
            self._begin_again(iteration)
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        self._close()
        if self._failures:
            log.getLogger(__name__).warning(
                "%s: what was reported %s is missing there, or a part of it",
                self._name,
                " and ".join(self._failures),
            )

    def _close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except Exception as error:
            self._failed(error)

    def _begin_again(self, step: int) -> None:
        had_failed = self._writer is None
        self._writer = self._open(*self._written)
        self._begun = self._written[0]
        if had_failed:
            self._failures[-1] += f" to {step}"
            log.getLogger(__name__).warning(
                "%s is written again from iteration %d on", self._name, step
            )

    def _pass(self, step: int, samples: int, write: Callable[[Writer], None]) -> None:
        try:
            if self._writer is None:
                if self._clock() < self._retry_at:
                    return
                self._begin_again(step)
            assert self._writer is not None
            write(self._writer)
        except Exception as error:  # each library has classes of its own
            self._failed(error)
        self._written = step, samples

    def _failed(self, error: Exception) -> None:
        """What was given to a writer before its first error may still have been in memory."""
        if self._writer is not None or not self._failures:
            since = self._written[0]
            if isinstance(self._writer, _TakesLater):
                since = self._begun if self._writer.taken is None else self._writer.taken
            self._failures.append(f"from about iteration {since}")
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            log.getLogger(__name__).warning(
                "%s cannot be written (%s); training continues without it", self._name, reason
            )
        self._writer, self._retry_at = None, self._clock() + self._pause


def build_writers(
    logging: LoggingConfig,
    *,
    resume_iteration: int = 0,
    resume_samples: int = 0,
    configuration: Mapping[str, Any] | None = None,
) -> RunWriter:
    """The writers that ``logging`` selects; on a resume, after the iteration and samples of the
    loaded checkpoint. Trackers show ``configuration``, without secrets. Raises ValueError or
    OSError if a new run asks for a tracker that is not installed or does not start, or for a file
    that cannot be written."""
    writers: list[RunWriter] = []
    if logging.metrics_file is not None:
        writers.append(JsonLinesWriter(Path(logging.metrics_file), resume_iteration))
    begin = resume_iteration, resume_samples
    if logging.trackers:
        shown = resolve_name(SECRETS)(configuration or {})
        writers += [_tracker(name, logging, begin, shown) for name in logging.trackers]
    return TeeWriter(writers)


def _tracker(
    name: str, logging: LoggingConfig, begin: tuple[int, int], configuration: Mapping[str, Any]
) -> LastingWriter:
    shown = {
        "tensorboard": f"--tensorboard-dir {logging.tensorboard_dir}",
        "wandb": f"--wandb-project {logging.wandb_project}" if logging.wandb_project else "",
    }
    return LastingWriter(
        shown.get(name) or f"--report-to {name}",
        lambda iteration, samples: resolve_name(TRACKER.format(name))(
            logging, configuration, iteration, samples
        ),
        *begin,
        # Weights & Biases waits for its server for minutes when it starts.
        pause=math.inf if name == "wandb" else 60.0,
    )


_START_OF_ROW = b'{"kind"'
_MOST_LINES_WITHOUT_ROW = 100
_MOST_BYTES_OF_LINE = 1 << 16


class JsonLinesWriter:
    """One JSON object a line: ``kind``, ``iteration``, ``consumed_samples``, ``consumed_tokens``
    and the values; NaN and infinity are null, as JSON has neither. A resumed run drops the rows
    past the resumed iteration, unless the file cannot be rewritten, and appends to it. A new run
    moves an existing file to ``NAME.1`` or the next free number. Raises ValueError if it is not a
    file of metrics."""

    def __init__(self, path: Path, resume_iteration: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():  # and not /dev/null, or a pipe
            _check_rows(path)
            if resume_iteration > 0:
                with _rows_may_stay(path, resume_iteration):
                    _drop_rows_past(path, resume_iteration)
            else:
                _set_aside(path)
        self._path = path
        # Not buffered: what a full disk does not take is kept here.
        self._file = path.open("ab", buffering=0)
        self._waiting = bytearray()
        self._lost = 0
        self._warned = False

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        if kind == STEP:
            return
        self._add(
            kind, step, samples, tokens, {name: _json_number(v) for name, v in values.items()}
        )

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        """A row of the kind ``text`` for each."""
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
            log.getLogger(__name__).warning("%s: %d rows are missing", self._path, lost)
        try:
            self._file.close()
        except OSError as error:
            self._warn(error)

    def _write(self) -> None:
        """Readers find whole lines, also after a kill. A full disk must not end a run: the rows
        wait until there is space again."""
        try:
            self._write_waiting()
        except OSError as error:
            self._warn(error)

    def _write_waiting(self) -> None:
        if not os.fstat(self._file.fileno()).st_nlink:
            self._begin_again()
        while self._waiting:
            written = self._file.write(self._waiting)
            del self._waiting[:written]

    def _reopen(self) -> None:
        before, self._file = self._file, self._path.open("ab", buffering=0)
        before.close()

    def _begin_again(self) -> None:
        """After somebody has deleted the file, or its folder."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._reopen()
        log.getLogger(__name__).warning(
            "%s was deleted while it was written: a new one begins here", self._path
        )

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.getLogger(__name__).warning(
                "%s: %s; training continues, and the rows wait in memory",
                self._path,
                error.strerror,
            )
        self._warned = True


_MOST_WAITING = 64 << 20
"""Bytes of rows that wait for space on a disk."""


def _json_number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check_rows(path: Path) -> None:
    """Refuses a file that was not written here, such as one of a checkpoint: it stays as it is."""
    with path.open("rb") as file:
        if not file.peek(1):
            return
        for _ in range(_MOST_LINES_WITHOUT_ROW):
            line = file.readline(_MOST_BYTES_OF_LINE)
            if not line:
                break
            # A power failure may have left a row that was begun, or zeros.
            if line.startswith(_START_OF_ROW) or _START_OF_ROW.startswith(line.strip(b"\0")):
                return
    raise ValueError(
        f"--metrics-file {path}: the file exists and has no rows of metrics; it is not touched: "
        "name another"
    )


@contextlib.contextmanager
def _rows_may_stay(path: Path, iteration: int) -> Iterator[None]:
    """For :func:`_drop_rows_past`: a run that continues does not end because of old rows."""
    try:
        yield
    except OSError as error:
        log.getLogger(__name__).warning(
            "%s: rows past iteration %d cannot be dropped (%s): they stay, and the new ones follow "
            "after them",
            path,
            iteration,
            error.strerror,
        )


def _drop_rows_past(path: Path, iteration: int) -> None:
    """Rewrites ``path`` without rows past ``iteration`` and without incomplete lines."""
    with replacing(path) as part, path.open("rb") as old, part.open("wb") as new:
        for number, line in enumerate(old, start=1):
            try:
                row = json.loads(line)
                kind, at = row["kind"], int(row["iteration"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                log.getLogger(__name__).warning("%s: dropped broken line %d", path, number)
                continue
            # Resuming from the same step again replaces the note that it was resumed there.
            if at < iteration or (at == iteration and kind != "resume"):
                new.write(line.rstrip(b"\n") + b"\n")
        sync(new)


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
