"""Terminal view of runs: one line per curve, with latest values, events and remaining time."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TextIO

import numpy as np

from megatron.apps.dashboard.runs import WatchedRun

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = {
    "reward": "reward",
    "loss": "training loss",
    "grad_norm": "gradient norm",
    "tokens_per_second_per_device": "tokens/s per device",
    "mfu": "MFU",
    "seconds_per_iteration": "seconds per step",
}
_EVENTS = 4
_NAME_WIDTH, _VALUE_WIDTH = 20, 10


def follow(
    runs: Sequence[WatchedRun],
    stream: TextIO = sys.stdout,
    seconds: float = 1.0,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show runs until interrupted. On a terminal, the display redraws itself if rich is installed.
    Otherwise a line is printed for each run that has new steps."""
    live = _live(stream)
    shown: dict[str, str] = {}
    with live or nullcontext():
        while True:
            for run in runs:
                run.refresh()
            if live is None:
                for run in runs:
                    line = _line(run)
                    if shown.get(run.id) != line:
                        print(printable(line), file=stream, flush=True)
                        shown[run.id] = line
            else:
                size = shutil.get_terminal_size()
                lines = [line for run in runs for line in report(run, size.columns)]
                live.update(_text(lines[: max(4, size.lines - 1)]), refresh=True)
            wait(seconds)


def report(run: WatchedRun, width: int) -> list[str]:
    """Return a report on a run as lines of at most ``width`` characters, followed by an empty
    line."""
    listing, summary = run.listing(), run.summary()
    lines = [_head(listing, summary["totals"])]
    if listing["error"]:
        lines.append(f"  {listing['error']}")
    lines += [f"  {note}" for note in listing["left_out"]]
    ids = {(one["kind"], one["name"]): one["id"] for one in summary["series"]}
    curves = [("train", name, words) for name, words in _SHOWN.items()]
    curves += [
        (kind, name, f"{kind} loss")
        for kind, name in ids
        if kind.startswith(("validation", "test")) and name == "loss"
    ]
    bars = max(4, width - _NAME_WIDTH - _VALUE_WIDTH - 4)
    for kind, name, words in curves:
        if (kind, name) in ids:
            id = ids[kind, name]
            curve = run.series([id], "iteration", None, None, 4 * bars, 0.0)[id]
            lines.append(_curve(words, curve["x"], curve["y"], bars))
    for event in summary["events"][-_EVENTS:]:
        lines.append(f"  step {event['iteration']:.0f}: {_event(event)}")
    return [line[:width] for line in [*lines, ""]]


def _head(listing: dict[str, Any], totals: dict[str, Any]) -> str:
    last, planned = listing["last"], listing["planned"]
    words = [listing["name"], "live" if listing["state"] == "live" else listing["words"]]
    if last is not None:
        step = f"step {last['iteration']:.0f}"
        words.append(step + (f" of {planned}" if planned else ""))
    if (left := totals.get("seconds_left")) is not None:
        words.append(f"{_duration(left)} left")
    if (cost := totals.get("cost")) is not None:
        words.append(f"cost {cost:.4g}")
    if listing["broken"]:
        words.append(f"{listing['broken']} broken lines passed over")
    return " | ".join(words)


def _line(run: WatchedRun) -> str:
    listing, totals = run.listing(), run.summary()["totals"]
    # Prefer the reward: in reinforcement learning, the policy loss is close to 0.
    leading = next((name for name in ("reward", "loss") if totals.get(name) is not None), None)
    words = [_head(listing, totals)]
    words += [] if leading is None else [f"{leading} {totals[leading]:.4f}"]
    return " | ".join(words + ([listing["error"]] if listing["error"] else []))


def _curve(name: str, x: Any, y: Any, bars: int) -> str:
    values = y[np.isfinite(y)]
    last = f"{values[-1]:.4g}" if len(values) else "-"
    return f"  {name[:_NAME_WIDTH]:{_NAME_WIDTH}}{last:>{_VALUE_WIDTH}}  {sparkline(x, y, bars)}"


def sparkline(x: Any, y: Any, width: int) -> str:
    """Draw a curve in ``width`` characters. Each character shows the largest value of its interval,
    so that spikes remain visible, or is blank if the interval has no value."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if not len(y):
        return ""
    pieces = ((x - x[0]) / max(x[-1] - x[0], 1e-300) * (width - 1)).astype(int)
    most = np.full(width, np.nan)
    np.fmax.at(most, pieces, y)
    low, high = np.nanmin(most), np.nanmax(most)
    levels = (most - low) / (high - low or 1.0) * (len(_BARS) - 1)
    return "".join(" " if math.isnan(level) else _BARS[round(level)] for level in levels)


def _event(event: dict[str, Any]) -> str:
    values = (
        f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in event["values"].items()
        if math.isfinite(value)
    )
    return ", ".join([event["kind"].replace("_", " "), *values])


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60 % 60), int(seconds // 3600)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"


def _live(stream: TextIO) -> Any:
    """Return a display that redraws itself, or None without a terminal or if rich is not
    installed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        return None
    return Live(console=Console(file=stream), auto_refresh=False, screen=False)


def _text(lines: Sequence[str]) -> Any:
    """Return lines as plain text, so that names of runs are not interpreted as markup."""
    from rich.text import Text

    return Text("\n".join(map(printable, lines)))


def printable(line: str) -> str:
    """Replace characters that a terminal would interpret."""
    return "".join(character if character.isprintable() else "?" for character in line)
