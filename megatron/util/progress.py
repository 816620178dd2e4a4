"""Progress bars with rate and time left, on a terminal only."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from megatron.util.processes import is_main_process


def progress_bar(
    what: str, items: Any = None, total: int | None = None, unit: str = "B"
) -> tqdm[Any]:
    """A bar on standard error: iterate over it, or use it in ``with`` and call ``update(n)``. It
    shows nothing where standard error is not a terminal or the process is not the main one, and
    disappears when the work is done."""
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
