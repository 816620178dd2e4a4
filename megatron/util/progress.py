"""Progress of long operations: bars on a terminal, lines in a log."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from megatron.util.processes import is_main_process


def progress_bar(
    what: str, items: Any = None, total: int | None = None, unit: str = "B", initial: int = 0
) -> tqdm[Any]:
    """Return a progress bar on standard error. Iterate over it, or use it in ``with`` and call
    ``update(n)``. It disappears when the work is done. It is disabled if standard error is not a
    terminal or this is not the main process."""
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
    """Return tqdm's options for the size of bars, by default to follow the terminal's width. Some
    programs create terminals of width 0, where tqdm would show nothing. These get a fixed size."""
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
    """In this context, print to standard output or ``stream`` above the progress bars."""
    with tqdm.external_write_mode(file=stream or sys.stdout):
        yield


def counted(items: Iterator[Any], bar: tqdm[Any]) -> Iterator[Any]:
    """Yield the items, and advance the bar by one after each item has been used."""
    for item in items:
        yield item
        bar.update()


def move_to(bar: tqdm[Any], done: int) -> None:
    """Advance a bar to ``done`` items in total."""
    bar.update(done - bar.n)


def say(line: str) -> None:
    """Print a line on standard output, above any bar."""
    tqdm.write(line, file=sys.stdout)
