"""Progress of work on documents: one updated line on a terminal, or repeated log lines."""

from __future__ import annotations

import sys
import time

_SECONDS_BETWEEN_LINES = 1.0


class Progress:
    """Display of the number of documents, their rate and the remaining time. A terminal shows one
    line that is updated; a log gets a new line at intervals."""

    def __init__(self, input_bytes: int, log_interval: int) -> None:
        """Start the clock. `input_bytes` is the size of all files, or 0 if unknown. `log_interval`
        is the number of documents between updates."""
        self._input_bytes, self._log_interval = input_bytes, log_interval
        self._start = time.monotonic()
        self._documents = self._text_bytes = self._skipped = 0
        self._logged_documents, self._logged_at = 0, self._start
        self._is_terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def update(self, documents: int, text_bytes: int, position: int) -> None:
        """Add documents with `text_bytes` bytes of text. `position` is the number of bytes read so
        far from the input files."""
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
        """Exclude bytes that an interrupted run has already read from this run's rate."""
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
    """Return a duration as hours, minutes and seconds (1:02:03), or "unknown" for infinity."""
    if seconds == float("inf"):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
