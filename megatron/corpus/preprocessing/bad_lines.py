"""Malformed lines: the first one ends the run, or all are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron.data.json_lines import BadLine

_SHOWN = 5


class BadLineReport:
    """Counts malformed lines by reason and keeps the first few."""

    def __init__(self, stop: bool) -> None:
        """With `stop`, the first line raises."""
        self._stop = stop
        self.shown: list[str] = []
        self.by_reason: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Lines left out."""
        return self.by_reason.total()

    def add(self, name: str, unit: str, bad_lines: Iterable[BadLine]) -> None:
        """Takes note of the malformed lines of a file; `unit` is what it has instead of lines.

        Raises:
            ValueError: there is one, and it must stop the run; names file, line and finding.
        """
        for line in bad_lines:
            located = f"{name}, {unit} {line.number}: {line.reason} ({line.detail})"
            if self._stop:
                raise ValueError(
                    f"--input {located}; a line must be a JSON object with the strings of "
                    "--json-keys (--on-bad-line skip leaves such lines out)"
                )
            self.by_reason[line.reason] += 1
            if len(self.shown) < _SHOWN:
                self.shown.append(located)

    def merge(self, by_reason: dict[str, int], shown: list[str]) -> None:
        """Takes over what another report, of input after this one's, has counted."""
        self.by_reason.update(by_reason)
        self.shown = [*self.shown, *shown][:_SHOWN]

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} x {reason}" for reason, count in self.by_reason.items())
        lines = [f"{self.total:,} malformed lines left out: {reasons}"]
        lines += [f"  {shown}" for shown in self.shown]
        if self.total > len(self.shown):
            lines.append(f"  and {self.total - len(self.shown):,} more")
        return "\n".join(lines)
