"""Plot of a run from its JSON-lines metrics, and helpers for plots of curves."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.training.registry import CLOCKS, TASK_COSTS
from megatron.training.writers import Rows, read_metrics
from megatron.util.files import write_whole

Points = tuple[list[float], list[float]]
"""Consumed tokens, and values. NaN leaves a gap in the line."""
_VALIDATION_COLOURS = ("#c8442f", "#e08a3c", "#8c3b6f", "#6b6b1e", "#444444") * 9
_TASK_COLOURS = ("#7b4fa3", "#c77f1a", "#2a8f8f", "#b0426a", "#4f6f2f", "#555555") * 9


def plot_loss(
    metrics_jsonl: str | os.PathLike[str],
    output_png: str | os.PathLike[str],
    *,
    unigram_entropy: float | None = None,
    title: str | None = None,
) -> None:
    """Plot training and validation loss over consumed tokens, with resumes marked.
    ``unigram_entropy``, in nats per token, is a horizontal line. Metrics of tasks
    (``--eval-tasks``) are plotted below, with one panel per metric. Replaces ``output_png``. Raises
    FileNotFoundError if ``metrics_jsonl`` does not exist, or ValueError if it is malformed or has
    no training steps."""
    # Figure rather than pyplot: no window system, no global state. The import takes seconds.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = read_metrics(metrics_jsonl)
    train = points(rows, "train", "loss")
    if not train[0]:
        raise ValueError(f"{metrics_jsonl}: no rows of kind 'train', so no loss to plot")

    tasks = task_metrics(rows)
    figure = Figure(figsize=(9, 5 + 2.2 * len(tasks)), dpi=150, layout="constrained")
    heights = [5.0, *[2.2] * len(tasks)]
    axes, *below = figure.subplots(
        len(heights), sharex=True, squeeze=False, height_ratios=heights
    ).flat
    label = f"training, {train[1][-1]:.2f} at the end"
    axes.plot(*train, color="#7aa6d8", linewidth=1.2, label=label, zorder=2)
    style: dict[str, Any] = {"linewidth": 2.0, "marker": "o", "markersize": 4.5, "zorder": 3}
    validations = validation_losses(rows).items()
    for colour, (kind, curve) in zip(_VALIDATION_COLOURS, validations, strict=False):
        axes.plot(*curve, color=colour, label=f"{kind}, {curve[1][-1]:.2f} at the end", **style)
    if unigram_entropy is not None:
        label = f"unigram entropy, {unigram_entropy:.2f}"
        axes.axhline(unigram_entropy, color="#444444", linestyle="--", linewidth=1.2, label=label)
    resumes = [row["consumed_tokens"] for row in rows if row["kind"] == "resume"]
    for number, tokens in enumerate(resumes):
        style = {"color": "#5b8c5a", "linestyle": ":", "linewidth": 1.6, "zorder": 1}
        axes.axvline(tokens, label=None if number else "resumed", **style)
    axes.set_ylabel("loss (nats per token)")
    names = dict.fromkeys(task for curves in tasks.values() for task in curves)
    colours = dict(zip(names, _TASK_COLOURS, strict=False))
    for panel, (metric, curves) in zip(below, tasks.items(), strict=True):
        for task, curve in curves.items():
            label = f"{task}, {curve[1][-1]:.4g} at the end"
            panel.plot(*curve, color=colours[task], marker="o", markersize=4, label=label)
        panel.set_ylabel(metric.replace("_", " "))
    for each in (axes, *below):
        decorate(each)
        where = "upper right" if each is axes else "best"
        each.legend(loc=where, frameon=True, framealpha=0.9, edgecolor="none")
    last = [axes, *below][-1]
    last.xaxis.set_major_formatter(EngFormatter(sep=""))
    last.set_xlim(left=0)
    last.set_xlabel("consumed tokens")
    if title is not None:
        axes.set_title(title, loc="left", fontweight="bold")
    figure.align_ylabels()
    save_picture(figure, output_png)


def decorate(axes: Any) -> None:
    """Draw a grid behind the curves, and remove the frame at the top and right."""
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_picture(figure: Any, output_png: str | os.PathLike[str]) -> None:
    """Write or replace a PNG file atomically, and create its folder."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    output = Path(output_png)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, picture.getvalue())


def points(rows: Rows, kind: str, name: str) -> Points:
    """Return a metric's values in all rows of a kind that contain it. null becomes NaN."""
    chosen = [row for row in rows if row["kind"] == kind and name in row]
    values = [math.nan if row[name] is None else float(row[name]) for row in chosen]
    return [float(row["consumed_tokens"]) for row in chosen], values


def validation_losses(rows: Rows) -> dict[str, Points]:
    """Return the validation losses by kind. A kind is ``validation``, followed by the name of the
    dataset if there are several."""
    kinds = dict.fromkeys(row["kind"] for row in rows)
    curves = {k: points(rows, k, "loss") for k in kinds if k.partition(" ")[0] == "validation"}
    return {kind: curve for kind, curve in curves.items() if curve[0]}


def task_metrics(rows: Rows) -> dict[str, dict[str, Points]]:
    """Return the metrics of a run's tasks as curves by metric and task, bits per byte first."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        kind, _, task = row["kind"].partition(" ")
        if kind == "task":
            metrics = (name for name in row if name not in {"kind", *CLOCKS, *TASK_COSTS})
            names.setdefault(task, {}).update(dict.fromkeys(metrics))
    curves: dict[str, dict[str, Points]] = {}
    for task, measured in names.items():
        for metric in shown_metrics(measured):
            curves.setdefault(metric, {})[task] = points(rows, f"task {task}", metric)
    return dict(sorted(curves.items(), key=lambda item: item[0] != "bits_per_byte"))


def shown_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics of a task that are plotted. Ratios are omitted, because they depend on the
    text alone. Loss and perplexity are omitted if there are bits per byte, which are equivalent."""
    names = [name for name in names if not name.endswith("ratio")]
    said = ("loss", "perplexity") if "bits_per_byte" in names else ()
    return [name for name in names if not name.endswith(said)]
