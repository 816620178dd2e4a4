"""Pictures of measurements."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

FIRST, SECOND = "#1f5fa8", "#c8662b"
"""Colours of two curves."""


def new_figure(height: float) -> Figure:
    """A figure that is 9 inches wide."""
    matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False})
    return Figure(figsize=(9, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG file, which appears when it is complete."""
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)
