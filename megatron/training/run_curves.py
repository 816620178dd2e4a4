"""Curves of several runs, from their TensorBoard events: a table for each and one picture."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.util.files import write_whole

_LAYOUT = re.compile(r"tp_?(\d+).*?pp_?(\d+).*?dp_?(\d+).*?sp_?(\d+)")


@dataclass(frozen=True)
class RunCurve:
    """One scalar of one run, by step; ``name`` is its layout, such as ``tp2_pp2_dp1_sp1``, where
    the folder's name has one."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]

    def by_step(self) -> dict[int, float]:
        """The values by step."""
        return dict(zip(self.steps, self.values, strict=True))


def read_curves(folder: str | os.PathLike[str], tag: str) -> list[RunCurve]:
    """The scalar ``tag`` of every run below ``folder``, in the order of their first steps. Of
    a tag with slashes the last part counts: ``lm-loss-training/lm loss`` is ``lm loss``. Raises
    ValueError if no run has it."""
    # Imported late: it takes seconds.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found, seen = [], set()
    for path in sorted({file.parent for file in Path(folder).rglob("events.out.tfevents.*")}):
        events: Any = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        tags = {name.rpartition("/")[2]: name for name in events.Tags()["scalars"]}
        seen |= set(tags)
        if name := tags.get(tag.rpartition("/")[2]):
            scalars = events.Scalars(name)
            found.append((path, [e.step for e in scalars], [e.value for e in scalars]))
    if not found:
        known = f"; there are {', '.join(sorted(seen))}" if seen else ": no TensorBoard events"
        raise ValueError(f"{folder}: no run has the scalar {tag!r}{known}")
    curves: list[RunCurve] = []
    for path, steps, values in sorted(found, key=lambda run: (run[1][0], run[0])):
        name = _name(path.relative_to(folder))
        same = sum(curve.name == name or curve.name.startswith(f"{name}-") for curve in curves)
        curves.append(RunCurve(f"{name}-{same + 1}" if same else name, steps, values))
    return curves


def _name(path: Path) -> str:
    layout = _LAYOUT.search(str(path))
    if layout is None:
        return "_".join(path.parts) or "run"
    return "tp{}_pp{}_dp{}_sp{}".format(*layout.groups())


def write_csv(curve: RunCurve, output: str | os.PathLike[str]) -> None:
    """Writes index, step and value, as pandas would write a table with these two columns."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["", "step", "value"])
    pairs = zip(curve.steps, curve.values, strict=True)
    rows.writerows((index, *pair) for index, pair in enumerate(pairs))
    write_whole(Path(output), text.getvalue().encode())


def plot_curves(
    curves: Sequence[RunCurve], output_png: str | os.PathLike[str], title: str, x: str, y: str
) -> None:
    """Draws the curves over each other, the first one widest, so that equal ones are all seen."""
    # Figure rather than pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        width = 4.5 if number == 0 and len(curves) > 1 else 1.2
        axes.plot(
            curve.steps,
            curve.values,
            linewidth=width,
            alpha=0.45 if width > 2 else 1,
            marker="." if len(curve.steps) < 30 else None,
            label=f"{curve.name}, steps {curve.steps[0]} to {curve.steps[-1]}",
        )
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_whole(Path(output_png), picture.getvalue())
