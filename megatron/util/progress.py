"""Progress of long work: bars on a terminal, lines in a log."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from megatron.util.processes import is_main_process

_SECONDS_BETWEEN_LINES = 1.0


def progress_bar(
    what: str, items: Any = None, total: int | None = None, unit: str = "B", initial: int = 0
) -> tqdm[Any]:
    """A bar on standard error: iterate over it, or use it in ``with`` and call ``update(n)``. It
    shows nothing where standard error is not a terminal or the process is not the main one, and
    disappears when the work is done."""
    return tqdm(
        items,
        desc=what,
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=unit in ("B", " tokens"),
        file=sys.stderr,
        disable=not (sys.stderr.isatty() and is_main_process()),
        leave=False,
        **_size(),
    )


def _size() -> dict[str, Any]:
    """Width and height of bars: by default those of the terminal, at any time. A terminal may have
    none, as some programs make them, and tqdm would show nothing."""
    try:
        sized = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        sized = True
    if sized:
        return {"dynamic_ncols": True}
    columns, rows = shutil.get_terminal_size()
    return {"ncols": columns, "nrows": rows}


@contextmanager
def above_bars(stream: Any = None) -> Iterator[None]:
    """Text that is printed within it, on standard output or ``stream``, appears above the bars."""
    with tqdm.external_write_mode(file=stream or sys.stdout):
        yield


def counted(items: Iterator[Any], bar: tqdm[Any]) -> Iterator[Any]:
    """The items, each of which moves the bar on by one."""
    for item in items:
        yield item
        bar.update()


def move_to(bar: tqdm[Any], done: int) -> None:
    """Moves a bar to a number of items that are done."""
    bar.update(done - bar.n)


def say(line: str) -> None:
    """Prints a line on standard output, above any bar."""
    tqdm.write(line, file=sys.stdout)


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
