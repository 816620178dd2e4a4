"""Writers between a run and an experiment tracker. ``LastingWriter`` protects the run from the
tracker's failures. ``BackgroundWriter`` calls a slow tracker in a background thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from megatron.training.registry import WrittenTexts
from megatron.training.writers import Values, Writer

MOST_WAITING = 10_000
"""Maximum number of calls queued for a tracker."""
SECONDS_TO_OPEN = 30.0
"""Seconds that a new run waits for a tracker to open. After that the run starts, and the tracker
may still open or fail."""
SECONDS_TO_CLOSE = 30.0
"""Seconds that a run waits at its end for the tracker to accept the last calls."""

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Writer that forwards calls to another writer in a background thread, in the same order. After
    an error in the thread, the next call raises it. Raises TimeoutError if too many calls are
    queued.

    Args:
        open: creates the other writer, in the thread.
        wait: whether to wait for ``open``, for a limited time, and raise its errors.
        seconds: time that :meth:`close` waits for the last calls; ``SECONDS_TO_CLOSE`` by
            default.
    """

    def __init__(
        self, open: Callable[[], Writer], wait: bool, seconds: float | None = None
    ) -> None:
        self.taken: int | None = None
        """Last step that the tracker has accepted; None before the first."""
        self._calls: queue.Queue[tuple[int, Callable[[Writer], None]] | None] = queue.Queue(
            MOST_WAITING
        )
        self._error: Exception | None = None
        self._opened, self._seconds = threading.Event(), seconds
        # A daemon thread, so that a tracker that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(open,), name="tracker", daemon=True)
        self._thread.start()
        if wait:
            self._opened.wait(SECONDS_TO_OPEN)
            self._raise()

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        row = dict(values)
        self._put((step, lambda to: to.scalars(kind, step, row, samples=samples, tokens=tokens)))

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        step = written.iteration
        self._put((step, lambda to: to.texts(written, samples=samples, tokens=tokens)))

    def close(self) -> None:
        """Wait for the queued calls, and raise the thread's error, if any. Raises TimeoutError if
        they take too long."""
        self._put(None)
        seconds = SECONDS_TO_CLOSE if self._seconds is None else self._seconds
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"it did not take the last rows within {seconds:.0f} s")
        self._raise()

    def _put(self, call: tuple[int, Callable[[Writer], None]] | None) -> None:
        self._raise()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            raise TimeoutError(f"{MOST_WAITING} rows wait for it") from None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, open: Callable[[], Writer]) -> None:
        try:
            try:
                writer = open()
            finally:
                self._opened.set()
            while (waiting := self._calls.get()) is not None:
                step, call = waiting
                call(writer)
                self.taken = step
            writer.close()
        except Exception as error:  # each library has its own error classes
            self._error = error


class LastingWriter:
    """Writer that forwards calls to another writer. If that one fails, calls are dropped, and after
    ``pause`` seconds the next call opens a new one.

    Args:
        name: name of the output in messages.
        open: creates a writer, given the last iteration and number of samples before its first row.
            Errors of the first call are raised, except in a resumed run.
        iteration: last iteration before the run; above 0 in a resumed run.
        samples: number of samples consumed before the run.
        pause: seconds from a failure to the next attempt.
        clock: returns the time in seconds.
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
        self._pass(
            written.iteration, samples, lambda to: to.texts(written, samples=samples, tokens=tokens)
        )

    def went_back(self, iteration: int, samples: int) -> None:
        """Continue after ``iteration``, which the run has returned to. A new writer replaces the
        current one and drops later steps."""
        self._close()
        self._written = iteration, samples
        try:
            self._begin_again(iteration)
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        self._close()
        if self._failures:
            logger.warning(
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
            logger.warning("%s is written again from iteration %d on", self._name, step)

    def _pass(self, step: int, samples: int, write: Callable[[Writer], None]) -> None:
        try:
            if self._writer is None:
                if self._clock() < self._retry_at:
                    return
                self._begin_again(step)
            assert self._writer is not None
            write(self._writer)
        except Exception as error:  # each library has its own error classes
            self._failed(error)
        self._written = step, samples

    def _failed(self, error: Exception) -> None:
        """Record a failure, drop the writer, and set the time of the next attempt. Rows before the
        error may be lost too, since the tracker may still have buffered them."""
        if self._writer is not None or not self._failures:
            since = self._written[0]
            if isinstance(self._writer, BackgroundWriter):
                since = self._begun if self._writer.taken is None else self._writer.taken
            self._failures.append(f"from about iteration {since}")
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            logger.warning(
                "%s cannot be written (%s); training continues without it", self._name, reason
            )
        self._writer, self._retry_at = None, self._clock() + self._pause
