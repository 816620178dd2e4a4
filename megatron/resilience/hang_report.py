"""The report of a run that does not advance, on the console and in a file."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.resilience.reports import Report
from megatron.resilience.verdict import Silent

_SECONDS = 5.0
"""For which it may take to be written; its storage may be what hangs."""


def described(reports: Mapping[int, Report], silent: Sequence[Silent]) -> str:
    """What each rank does, with its stacks; the silent ones first."""
    lines = []
    for one in silent:
        state = f"its process {one.state}" if one.state else "nothing is known of its process"
        last = f"last seen in phase {one.phase} at iteration {one.iteration}"
        lines.append(f"{one.name} does not answer: {state}; {last}")
    for rank in sorted(reports):
        found = reports[rank]
        does = "waits for other ranks in" if found.waits else "works in"
        detail = f" ({found.detail})" if found.detail else ""
        lines.append(
            f"{found.name}: {found.place}{detail}, {found.idle} s without progress; it {does} "
            f"{found.site}"
        )
        if found.waited_for:
            lines.append(f"  it waits for {found.waited_for}")
        if found.error:
            lines.append(f"  it ends by an error: {found.error}")
        lines.append(found.stacks)
    return "\n".join(lines)


def write_report(line: str, body: str, save: str | None) -> None:
    """Writes a line and what follows to the console and, with ``save``, to a file
    ``hang-<time>.txt`` in that folder; without waiting long for either."""

    def show() -> None:
        print(f"{line}\n{body}" if body else line, file=sys.stderr, flush=True)

    def store() -> None:
        folder = Path(save or "")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            file.write_text(f"{line}\n\n{body}\n", encoding="utf-8")

    works = [show, store] if save is not None and body else [show]
    in_time(*works)


def in_time(*works: Callable[[], None]) -> None:
    """Does things beside each other, and returns when they are done, or take too long."""
    threads = [threading.Thread(target=work, name="report", daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
