"""A picture of a run from its JSON-lines metrics."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

from megatron.util.files import write_whole


def plot_loss(
    metrics_jsonl: str | os.PathLike[str],
    output_png: str | os.PathLike[str],
    *,
    unigram_entropy: float | None = None,
    title: str | None = None,
) -> None:
    """Draws training and validation loss over consumed tokens, with the resumes marked;
    ``unigram_entropy``, in nats per token, is a horizontal line. Replaces ``output_png``. Raises
    FileNotFoundError if ``metrics_jsonl`` does not exist. Raises ValueError if it is broken or has
    no training steps."""
    # Figure rather than pyplot: no window system, no global state. Imported late: it takes seconds.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = _read(Path(metrics_jsonl))
    train, validation = _curve(rows, "train"), _curve(rows, "validation")
    if not train[0]:
        raise ValueError(f"{metrics_jsonl}: no rows of kind 'train', so no loss to plot")

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    label = f"training, {train[1][-1]:.2f} at the end"
    axes.plot(*train, color="#7aa6d8", linewidth=1.2, label=label, zorder=2)
    if validation[0]:
        label = f"validation, {validation[1][-1]:.2f} at the end"
        style: dict[str, Any] = {"linewidth": 2.0, "marker": "o", "markersize": 4.5, "zorder": 3}
        axes.plot(*validation, color="#c8442f", label=label, **style)
    if unigram_entropy is not None:
        label = f"unigram entropy, {unigram_entropy:.2f}"
        axes.axhline(unigram_entropy, color="#444444", linestyle="--", linewidth=1.2, label=label)
    resumes = [row["consumed_tokens"] for row in rows if row["kind"] == "resume"]
    for number, tokens in enumerate(resumes):
        style = {"color": "#5b8c5a", "linestyle": ":", "linewidth": 1.6, "zorder": 1}
        axes.axvline(tokens, label=None if number else "resumed", **style)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.set_xlabel("consumed tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none")
    if title is not None:
        axes.set_title(title, loc="left", fontweight="bold")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    output = Path(output_png)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, picture.getvalue())


def _read(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            # A process that still runs, or was killed, may have left half a line at the end.
            if not line.endswith("\n"):
                break
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not a JSON object ({error})") from error
    return rows


def _curve(rows: list[dict[str, Any]], kind: str) -> tuple[list[float], list[float]]:
    """Tokens and loss; a null loss becomes NaN, a gap in the line."""
    chosen = [row for row in rows if row["kind"] == kind]
    losses = [math.nan if row["loss"] is None else float(row["loss"]) for row in chosen]
    return [float(row["consumed_tokens"]) for row in chosen], losses
