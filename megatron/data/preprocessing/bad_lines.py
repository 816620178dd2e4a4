"""Malformed lines: the first one ends the run, or all are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from megatron.data.preprocessing.records import BadLine

_SHOWN = 5


class BadLineReport:
    """Counts malformed lines by reason and keeps the first few."""

    def __init__(self, stop: bool) -> None:
        """With `stop`, the first line raises."""
        self._stop = stop
        self._shown: list[str] = []
        self.by_reason: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Lines left out."""
        return self.by_reason.total()

    def add(self, path: Path, bad_lines: list[BadLine]) -> None:
        """Takes note of the malformed lines of a file.

        Raises:
            ValueError: there is one, and it must stop the run; names file, line and finding.
        """
        for line in bad_lines:
            located = f"{path}, line {line.number}: {line.reason} ({line.detail})"
            if self._stop:
                raise ValueError(
                    f"--input {located}; a line must be a JSON object with the strings of "
                    "--json-keys (--on-bad-line skip leaves such lines out)"
                )
            self.by_reason[line.reason] += 1
            if len(self._shown) < _SHOWN:
                self._shown.append(located)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.by_reason.items())
        lines = [f"{self.total:,} malformed lines left out: {reasons}"]
        lines += [f"  {shown}" for shown in self._shown]
        if self.total > len(self._shown):
            lines.append(f"  and {self.total - len(self._shown):,} more")
        return "\n".join(lines)
