"""Curves of several runs, from TensorBoard events or JSON-lines metrics: a table for each run, and
one plot."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.apps.pictures.plots import (
    Points,
    decorate,
    save_picture,
    task_metrics,
    validation_losses,
)
from megatron.training.writers import Rows, read_metrics
from megatron.util.files import write_whole

_LAYOUT = re.compile(r"tp_?(\d+).*?pp_?(\d+).*?dp_?(\d+).*?sp_?(\d+)")


@dataclass(frozen=True)
class RunCurve:
    """One scalar of one run, by step or by another clock. ``name`` is the layout if the run's
    folder name contains one, such as ``tp2_pp2_dp1_sp1``."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]

    def by_step(self) -> dict[float, float]:
        """Return the values, keyed by step."""
        return dict(zip(self.steps, self.values, strict=True))


def read_curves(folder: str | os.PathLike[str], tag: str) -> list[RunCurve]:
    """Read the scalar ``tag`` of every run below ``folder``, in the order of their first steps. If
    a run lacks it, a tag with the same last component is used: ``lm loss`` for
    ``lm-loss-training/lm loss``. Raises ValueError if no run has such a scalar."""
    # Imported here, because the import takes seconds.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs, seen = [], set()
    for path in sorted({file.parent for file in Path(folder).rglob("events.out.tfevents.*")}):
        events: Any = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        tags = events.Tags()["scalars"]
        seen |= {name.rpartition("/")[2] for name in tags}
        alike = (name for name in tags if name.rpartition("/")[2] == tag.rpartition("/")[2])
        if name := tag if tag in tags else next(alike, None):
            scalars = events.Scalars(name)
            runs.append((path, [e.step for e in scalars], [e.value for e in scalars]))
    if not runs:
        known = f"; there are {', '.join(sorted(seen))}" if seen else ": no TensorBoard events"
        raise ValueError(f"{folder}: no run has the scalar {tag!r}{known}")
    curves: list[RunCurve] = []
    for path, steps, values in sorted(runs, key=lambda run: (run[1][0], run[0])):
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
    """Write a curve as CSV with columns for index, step and value, like a pandas table."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["", "step", "value"])
    pairs = zip(curve.steps, curve.values, strict=True)
    rows.writerows((index, *pair) for index, pair in enumerate(pairs))
    write_whole(Path(output), text.getvalue().encode())


def read_tables(folder: str | os.PathLike[str], prefix: str) -> list[RunCurve]:
    """Read the tables that ``write_csv`` has written in a folder, in the order of their first
    steps. File names consist of ``prefix``, the run's name and ``.csv``. Raises ValueError if there
    is no such file, or a file is not such a table. The message gives the line."""
    curves = []
    for path in sorted(Path(folder).glob(f"{prefix}*.csv")):
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            try:
                pairs = [(float(row["step"]), float(row["value"])) for row in rows]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: line {rows.line_num}: expected columns step and value with numbers"
                ) from error
        if not pairs:
            raise ValueError(f"{path}: has no rows")
        steps = [int(step) if step.is_integer() else step for step, _ in pairs]
        name = path.stem.removeprefix(prefix)
        curves.append(RunCurve(name, steps, [value for _, value in pairs]))
    if not curves:
        raise ValueError(f"{folder}: no table {prefix}*.csv")
    return sorted(curves, key=lambda curve: curve.steps[0])


@dataclass(frozen=True)
class Panel:
    """Curves that share a vertical axis. Without ``labels``, the legend shows their names and last
    values."""

    y: str
    curves: Sequence[RunCurve]
    labels: Sequence[str] = ()


def plot_curves(
    curves: Sequence[RunCurve], output_png: str | os.PathLike[str], title: str, x: str, y: str
) -> None:
    """Plot the curves in one panel. The first is widest, so that equal curves remain visible."""
    labels = [f"{c.name}, steps {c.steps[0]} to {c.steps[-1]}" for c in curves]
    draw_panels([Panel(y, curves, labels)], output_png, x, title, first_widest=len(curves) > 1)


def draw_panels(
    panels: Sequence[Panel],
    output_png: str | os.PathLike[str],
    x: str,
    title: str | None = None,
    first_widest: bool = False,
) -> None:
    """Plot panels stacked vertically, with a common horizontal axis, to a PNG file.
    ``first_widest`` draws the first curve of each panel wide and pale."""
    # Figure rather than pyplot: no window system, no global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    height = 5 if len(panels) == 1 else 2.8 * len(panels)
    figure = Figure(figsize=(9, height), dpi=150, layout="constrained")
    every = list(figure.subplots(len(panels), sharex=True, squeeze=False).flat)
    for axes, panel in zip(every, panels, strict=True):
        labels = panel.labels or [f"{c.name}, {c.values[-1]:.4g} at the end" for c in panel.curves]
        for number, (curve, label) in enumerate(zip(panel.curves, labels, strict=True)):
            wide = first_widest and number == 0
            axes.plot(
                curve.steps,
                curve.values,
                linewidth=4.5 if wide else 1.2,
                alpha=0.45 if wide else 1,
                marker="." if len(curve.steps) < 30 else None,
                label=label,
            )
        axes.set_ylabel(panel.y)
        decorate(axes)
        axes.legend(frameon=False)
    if title is not None:
        every[0].set_title(title, loc="left", fontweight="bold")
    every[-1].set_xlabel(x)
    if panels[0].curves[0].steps[-1] >= 10**5:
        every[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.align_ylabels()
    save_picture(figure, output_png)


def read_evaluations(runs: Mapping[str, str | os.PathLike[str]]) -> list[Panel]:
    """Return panels with the evaluations of runs: validation losses and task metrics over consumed
    tokens. ``runs`` maps names to the paths of JSON-lines metrics. Raises FileNotFoundError if a
    file does not exist, or ValueError if it is malformed or has no evaluations."""
    panels: dict[str, list[RunCurve]] = {}
    for name, path in runs.items():
        curves = list(_evaluations(read_metrics(path)))
        if not curves:
            raise ValueError(f"{path}: no evaluations, so nothing to draw")
        for y, curve in curves:
            panels.setdefault(y, []).append(RunCurve(name, *curve))
    return [Panel(y, each) for y, each in panels.items()]


def _evaluations(rows: Rows) -> Iterator[tuple[str, Points]]:
    for kind, curve in validation_losses(rows).items():
        yield f"{kind} loss", curve
    for metric, curves in task_metrics(rows).items():
        for task, curve in curves.items():
            yield f"{task}\n{metric.replace('_', ' ')}", curve
