"""Progress bars with rate and time left, on a terminal only."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from megatron.util.processes import is_main_process


def progress_bar(
    what: str, items: Any = None, total: int | None = None, unit: str = "B"
) -> tqdm[Any]:
    """A bar on standard error: iterate over it, or use it in ``with`` and call ``update(n)``.

    It shows nothing where standard error is not a terminal, so that log files contain no escape
    codes, and nothing in processes other than the main one. It disappears when the work is done.

    Args:
        what: the work, shown before the bar.
        items: what to iterate over.
        total: number of units, if ``items`` is not given or has no length.
        unit: what is counted, such as ``" samples"``; bytes by default.
    """
    return tqdm(
        items,
        desc=what,
        total=total,
        unit=unit,
        unit_scale=unit in ("B", " tokens"),
        file=sys.stderr,
        disable=not (sys.stderr.isatty() and is_main_process()),
        leave=False,
        dynamic_ncols=True,
    )


def say(line: str) -> None:
    """Prints a line on standard output, above any bar."""
    tqdm.write(line, file=sys.stdout)
