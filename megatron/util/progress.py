"""Progress bars with rate and time left, on a terminal only."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from megatron.util.processes import is_main_process


def progress(
    what: str, items: Any = None, total: int | None = None, unit: str = "it", **settings: Any
) -> tqdm[Any]:
    """A bar on standard error: iterate over it, or use it in ``with`` and call ``update(n)``.

    It is silent where standard error is no terminal, so that no log file has escape codes, and in
    all processes of a run but the main one. It disappears when it is done.

    Args:
        what: what is done, before the bar.
        items: what it iterates over.
        total: number of items, where they have no length.
        unit: what is counted; ``B`` is shown as kB, MB, GB.
        settings: further arguments of tqdm.
    """
    return tqdm(
        items,
        desc=what,
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        file=sys.stderr,
        disable=not (sys.stderr.isatty() and is_main_process()),
        leave=False,
        dynamic_ncols=True,
        **settings,
    )
