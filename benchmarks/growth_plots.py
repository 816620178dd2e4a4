"""Plots of ``growth.py``: time and memory of a step next to their formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from pictures import FIRST, SECOND, new_figure, save

MEASURED, FORMULA = FIRST, SECOND


def plot(unit: str, points: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture with two panels.

    Args:
        unit: what the values count.
        points: as ``growth.measure`` gives them.
        path: a PNG file.
    """
    figure = new_figure(3.4)
    time, memory = figure.subplots(1, 2)
    draw(time, points, "cpu_seconds", "formula_seconds", "FLOPs / rate of the products")
    time.set_ylabel("CPU seconds a step, all processes")
    draw(memory, points, "bytes", "formula_bytes", "formula of megatron/apps/planning")
    memory.set_ylabel("peak memory of a process, MiB")
    for axes in (time, memory):
        axes.set_xlabel(unit)
        axes.legend(frameon=False)
        axes.grid(axis="y", which="major", alpha=0.3)
    save(figure, path)


def draw(axes: Axes, points: list[dict[str, Any]], measured: str, formula: str, label: str) -> None:
    """Lines over sizes in logarithmic axes, or pairs of bars over names."""
    scale = 1 / 2**20 if measured == "bytes" else 1.0
    found = [scale * each[measured] for each in points]
    expected = [scale * each[formula] for each in points]
    values = [each["value"] for each in points]
    if isinstance(values[0], str):
        places = range(len(values))
        axes.bar([p - 0.2 for p in places], found, 0.4, label="measured", color=MEASURED)
        axes.bar([p + 0.2 for p in places], expected, 0.4, label=label, color=FORMULA)
        axes.set_xticks(list(places), values, rotation=40, ha="right")
        axes.margins(y=0.25)
        return
    axes.plot(values, found, "o-", label="measured", color=MEASURED)
    axes.plot(values, expected, "s--", label=label, color=FORMULA)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
