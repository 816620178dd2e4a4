"""Plots of scores by context length and depth, and of the loss by position."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.apps.pictures.plots import decorate, save_picture

Grid = dict[str, dict[str, float]]
"""Scores by context length in tokens and depth in percent. Both keys are strings. The depth "all"
is the mean over all documents."""
LOSS = "loss_by_position"
_COLUMNS = 3


def scores_by_length(
    results: Mapping[str, Mapping[str, Any]], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the mean scores of the long-context tasks in lm-eval's results and samples:
    ``scores``, a :data:`Grid` for each task, and ``loss``, nats per token by the end of each range
    of positions. Keys without values are left out."""
    scores: dict[str, Grid] = {}
    for task, rows in samples.items():
        by_place: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            doc = row["doc"]
            if "max_length" not in doc or "depth" not in doc:
                break
            length, depth = str(doc["max_length"]), doc["depth"]
            places = ["all"] if depth is None else ["all", f"{100 * depth:g}"]
            for place in places:
                by_place.setdefault((length, place), []).append(float(row[length]))
        for (length, place), values in sorted(by_place.items(), key=_numbers):
            grid = scores.setdefault(task, {})
            grid.setdefault(length, {})[place] = sum(values) / len(values)
    loss = {
        metric.partition(",")[0].partition("-")[2]: float(value)
        for metric, value in results.get(LOSS, {}).items()
        if metric[0].isdecimal() and "_stderr" not in metric
    }
    content = {"scores": scores, "loss": loss}
    return {name: part for name, part in content.items() if part}


def _numbers(item: tuple[tuple[str, str], list[float]]) -> tuple[int, float]:
    length, place = item[0]
    return int(length), -1.0 if place == "all" else float(place)


def draw_lengths(
    by_length: Mapping[str, Any],
    output_png: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> None:
    """Plot the result of :func:`scores_by_length`: a heat map over length and depth for each task
    with depths, one panel of curves over length for the other tasks, and one panel of the loss.
    Replaces ``output_png``."""
    # Imported here, because the import takes seconds.
    from matplotlib.figure import Figure

    scores: Mapping[str, Grid] = by_length.get("scores", {})
    deep = [task for task, grid in scores.items() if any(len(row) > 1 for row in grid.values())]
    flat = [task for task in scores if task not in deep]
    count = len(deep) + bool(flat) + ("loss" in by_length)
    columns = min(_COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1 + 4 * columns, 0.6 + 3 * rows), dpi=150, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    image = None
    for axes, task in zip(panels, deep, strict=False):
        image = draw_grid(axes, task, scores[task])
    if image is not None:
        bar = figure.colorbar(image, ax=panels[: len(deep)], aspect=30, shrink=0.9)
        bar.set_label("score")
    rest = iter(panels[len(deep) :])
    if flat:
        _draw_curves(next(rest), {task: scores[task] for task in flat})
    if "loss" in by_length:
        draw_loss(next(rest), {"": by_length["loss"]})
    for axes in rest:
        axes.set_axis_off()
    if title is not None:
        figure.suptitle(title, fontweight="bold")
    save_picture(figure, output_png)


def draw_grid(axes: Any, title: str, grid: Grid) -> Any:
    """Draw a heat map of scores, with lengths from left to right and depths from top to bottom.
    Return the matplotlib image."""
    lengths = list(grid)
    depths = sorted({d for row in grid.values() for d in row if d != "all"}, key=float)
    table = [[grid[n].get(depth, float("nan")) for n in lengths] for depth in depths]
    image = axes.imshow(table, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [shown_length(n) for n in lengths])
    axes.set_yticks(range(len(depths)), depths)
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth (%)")
    mean = sum(row["all"] for row in grid.values()) / len(grid)
    axes.set_title(f"{title}, mean {mean:.3g}", fontsize="medium")
    return image


def _draw_curves(axes: Any, scores: Mapping[str, Grid]) -> None:
    for task, grid in scores.items():
        axes.plot(range(len(grid)), [row["all"] for row in grid.values()], marker="o", label=task)
        axes.set_xticks(range(len(grid)), [shown_length(n) for n in grid])
    decorate(axes)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("tokens")
    axes.set_ylabel("score")
    axes.legend(fontsize="small")


def draw_loss(axes: Any, losses: Mapping[str, Mapping[str, float]]) -> None:
    """Draw curves of the loss over positions, one per label. A point is at the end of its range."""
    for label, loss in losses.items():
        axes.plot([int(end) for end in loss], list(loss.values()), marker="o", label=label)
    decorate(axes)
    axes.set_xscale("log", base=2)
    ends = sorted({int(end) for loss in losses.values() for end in loss})
    axes.set_xticks(ends, [shown_length(end) for end in ends])
    axes.minorticks_off()
    axes.set_xlabel("position (end of the range)")
    axes.set_ylabel("loss (nats per token)")
    if any(losses):
        axes.legend(fontsize="small")


def shown_length(length: int | str) -> str:
    """Format a number of tokens, for example 4096 as 4k."""
    count = int(length)
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
