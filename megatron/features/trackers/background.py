"""A writer whose program may take its time: it is called in a thread, for which training does not
wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from megatron.training.metrics import WrittenTexts
from megatron.training.writers import Values, Writer

MOST_WAITING = 10_000
"""Rows that wait for a program."""
SECONDS_TO_OPEN = 30.0
"""For which a new run waits for a program; it may open later, or fail then."""
SECONDS_TO_CLOSE = 30.0
"""For which the end of a run waits for the last rows."""


class BackgroundWriter:
    """Calls a writer in a thread, in the order of the calls here. What it raises is raised by the
    next call here, and so is that too many calls wait.

    Args:
        open: makes the writer, in the thread.
        wait: whether to wait for ``open`` and raise its errors, though not longer than some
            seconds.
        seconds: to wait for the last calls in :meth:`close`, by default ``SECONDS_TO_CLOSE``.
    """

    def __init__(
        self,
        open: Callable[[], Writer],
        wait: bool,
        seconds: float | None = None,
    ) -> None:
        self.taken: int | None = None
        """The last step that the program took."""
        self._calls: queue.Queue[tuple[int, Callable[[Writer], None]] | None] = queue.Queue(
            MOST_WAITING
        )
        self._error: Exception | None = None
        self._opened, self._seconds = threading.Event(), seconds
        # A daemon: a program that answers no more must not keep the process.
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
        """Waits for what was written, but not longer than some seconds: TimeoutError then."""
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
        except Exception as error:  # each library has classes of its own
            self._error = error
