"""Curves of several runs, from their TensorBoard events or JSON-lines metrics: a table for each and
one picture."""

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
    """One scalar of one run, by step or another clock; ``name`` is its layout, such as
    ``tp2_pp2_dp1_sp1``, where the folder's name has one."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]

    def by_step(self) -> dict[float, float]:
        """The values by step."""
        return dict(zip(self.steps, self.values, strict=True))


def read_curves(folder: str | os.PathLike[str], tag: str) -> list[RunCurve]:
    """The scalar ``tag`` of every run below ``folder``, in the order of their first steps. For a
    run without it the tag with the same last part is used: ``lm loss`` for ``lm-loss-training/lm
    loss``. Raises ValueError if no run has it."""
    # Imported late: it takes seconds.
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
    """Writes index, step and value, as pandas would write a table with these two columns."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["", "step", "value"])
    pairs = zip(curve.steps, curve.values, strict=True)
    rows.writerows((index, *pair) for index, pair in enumerate(pairs))
    write_whole(Path(output), text.getvalue().encode())


def read_tables(folder: str | os.PathLike[str], prefix: str) -> list[RunCurve]:
    """The tables of ``write_csv`` in a folder whose names are ``prefix``, the run's name and
    ``.csv``, in the order of their first steps. Raises ValueError if the folder has no such file,
    or naming the line of a file that is not such a table."""
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
    """Curves with a vertical axis in common; without ``labels`` the legend has their names and last
    values."""

    y: str
    curves: Sequence[RunCurve]
    labels: Sequence[str] = ()


def plot_curves(
    curves: Sequence[RunCurve], output_png: str | os.PathLike[str], title: str, x: str, y: str
) -> None:
    """Draws the curves over each other, the first one widest, so that equal ones are all seen."""
    labels = [f"{c.name}, steps {c.steps[0]} to {c.steps[-1]}" for c in curves]
    draw_panels([Panel(y, curves, labels)], output_png, x, title, first_widest=len(curves) > 1)


def draw_panels(
    panels: Sequence[Panel],
    output_png: str | os.PathLike[str],
    x: str,
    title: str | None = None,
    first_widest: bool = False,
) -> None:
    """Draws panels below each other over one horizontal axis, and makes the picture's folder;
    ``first_widest`` draws the first curve of each wide and pale."""
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
    """Return the evaluations of runs, by the paths of their JSON-lines metrics: validation losses
    and the metrics of tasks over consumed tokens, a panel for each. Raises FileNotFoundError;
    ValueError if a file is broken, or has no evaluations."""
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
