"""Progress on stderr, malformed lines, and the summary of what was written."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from megatron.apps.corpus.preprocessing.encode import EncodedTexts
from megatron.data.json_lines import BadLine

_SECONDS_BETWEEN_LINES = 1.0
_SHOWN = 5


class Progress:
    """Documents, their rate and the time left: one line that changes on a terminal, a line now and
    then in a log."""

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
        """After `documents` more of `text_bytes`, at byte `position` of the input files."""
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
        """What an interrupted run has read, which does not count towards this one's rate."""
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
    """Hours, minutes and seconds: 1:02:03."""
    if seconds == float("inf"):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@dataclass
class BadLines:
    by_reason: dict[str, int] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)
    """The first few, with file and line."""

    def add(self, name: str, unit: str, line: BadLine) -> None:
        """A line of the file `name`, whose records are called `unit`."""
        self.merge(BadLines({line.reason: 1}, [located(name, unit, line)]))

    def merge(self, later: BadLines) -> None:
        """Adds those of input that comes later."""
        for reason, count in later.by_reason.items():
            self.by_reason[reason] = self.by_reason.get(reason, 0) + count
        self.shown = [*self.shown, *later.shown][:_SHOWN]

    def __str__(self) -> str:
        total = sum(self.by_reason.values())
        reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.by_reason.items())
        lines = [f"{total:,} malformed lines left out: {reasons}"]
        lines += [f"  {shown}" for shown in self.shown]
        if total > len(self.shown):
            lines.append(f"  and {total - len(self.shown):,} more")
        return "\n".join(lines)


def located(name: str, unit: str, line: BadLine) -> str:
    """For messages: where a malformed line is, and what is wrong with it."""
    return f"{name}, {unit} {line.number}: {line.reason} ({line.detail})"


@dataclass
class KeySummary:
    prefix: str
    """Of the .bin and .idx."""
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the texts."""
    empty: int = 0
    """Texts without a token, left out."""

    def add(self, other: KeySummary | EncodedTexts) -> None:
        """Adds the counts of a block or of a partition."""
        if isinstance(other, EncodedTexts):
            lengths, documents = other.sequence_lengths, other.sequences_per_document
            sizes = (len(documents), len(lengths), len(other.tokens))
            other = KeySummary("", *sizes, other.text_bytes, other.empty)
        self.documents += other.documents
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.empty += other.empty


@dataclass(frozen=True)
class PreprocessSummary:
    keys: dict[str, KeySummary]
    bad_lines: dict[str, int]
    """Lines left out, by reason."""
    seconds: float
    """Of this run, without an interrupted one before it."""
    parts_left: str | None = None
    """With --partition-rank: what remains to be done before there is an output."""
