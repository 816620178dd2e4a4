"""Progress of long work: bars on a terminal, lines in a log."""

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
