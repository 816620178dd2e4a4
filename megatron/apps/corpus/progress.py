"""Progress of work on documents: one line that changes on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time

_SECONDS_BETWEEN_LINES = 1.0


class Progress:
    """Documents, their rate and the time left: one line that changes on a terminal, a line at
    intervals in a log."""

    def __init__(self, input_bytes: int, log_interval: int) -> None:
        """`input_bytes` is the size of all files, 0 where it is not known; `log_interval` the
        documents between lines."""
        self._input_bytes, self._log_interval = input_bytes, log_interval
        self._start = time.monotonic()
        self._documents = self._text_bytes = self._skipped = 0
        self._logged_documents, self._logged_at = 0, self._start
        self._is_terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def update(self, documents: int, text_bytes: int, position: int) -> None:
        """Add documents of `text_bytes`, up to byte `position` of the input files."""
        self._documents += documents
        self._text_bytes += text_bytes
        now = time.monotonic()
        if (
            self._documents - self._logged_documents >= self._log_interval
            and now - self._logged_at >= _SECONDS_BETWEEN_LINES
        ):
            self._logged_documents, self._logged_at = self._documents, now
            start, end = ("\r\x1b[K", "") if self._is_terminal else ("", "\n")
            print(start + self._line(position), file=sys.stderr, end=end, flush=True)

    def skip(self, input_bytes: int) -> None:
        """Leave bytes that an interrupted run has read out of this one's rate."""
        self._skipped += input_bytes

    def close(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", file=sys.stderr, end="", flush=True)

    def _line(self, position: int) -> str:
        seconds = self.seconds
        line = (
            f"{self._documents:,} documents, {self._documents / seconds:,.0f} documents/s, "
            f"{self._text_bytes / seconds / 1e6:.1f} MB/s"
        )
        if not self._input_bytes:
            return line
        here = position - self._skipped
        left = seconds * (self._input_bytes - position) / here if here > 0 else float("inf")
        return f"{line}, {position / self._input_bytes:.0%}, {duration(left)} left"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds: 1:02:03."""
    if seconds == float("inf"):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
