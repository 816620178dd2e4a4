"""Plot of the load of a run's experts, from the JSON-lines metrics.

Shapes: R rows of metrics for a layer, E experts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from megatron.apps.pictures.plots import save_picture
from megatron.training.writers import read_metrics

_KIND = "expert_loads"
_MOST_LAYERS = 8


class LayerLoads(NamedTuple):
    """Loads of one layer's experts over a run.

    Attributes:
        tokens: number of consumed tokens at each row of the metrics, [R].
        loads_ER: each expert's tokens divided by the layer's mean. 1 is perfect balance.
    """

    tokens: list[float]
    loads_ER: np.ndarray


def read_loads(metrics_jsonl: str | os.PathLike[str]) -> dict[int, LayerLoads]:
    """Read the loads of each layer with experts. Raises FileNotFoundError if the file does not
    exist, or ValueError if it is malformed or from a run without experts."""
    rows: dict[int, list[Mapping[str, float]]] = {}
    for row in read_metrics(metrics_jsonl):
        if row["kind"] == _KIND:
            rows.setdefault(int(row["layer"]), []).append(row)
    if not rows:
        raise ValueError(f"{metrics_jsonl}: no rows of kind {_KIND!r}: the run has no experts")
    loads = {}
    for layer, of_layer in sorted(rows.items()):
        count = sum(name.startswith("expert_") for name in of_layer[0])
        shares_ER = np.array([[row[f"expert_{n}"] for row in of_layer] for n in range(count)])
        mean_R = np.maximum(shares_ER.mean(0), 1e-30)
        tokens = [float(row["consumed_tokens"]) for row in of_layer]
        loads[layer] = LayerLoads(tokens, shares_ER / mean_R)
    return loads


def plot_loads(
    metrics_jsonl: str | os.PathLike[str],
    output_png: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> None:
    """Plot every expert's load over consumed tokens, with one panel per layer, for at most eight
    evenly spaced layers. White is the mean, blue less, red more; colours are clipped at a
    quarter and four times the mean. Replaces ``output_png``. Raises the same errors as
    :func:`read_loads`."""
    # Imported here, because the import takes seconds.
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    loads = read_loads(metrics_jsonl)
    layers = list(loads)
    if len(layers) > _MOST_LAYERS:
        places = np.linspace(0, len(layers) - 1, _MOST_LAYERS).round().astype(int)
        layers = [layers[place] for place in places]
    figure = Figure(figsize=(9, 1.2 + 1.6 * len(layers)), dpi=150, layout="constrained")
    panels = figure.subplots(len(layers), sharex=True, squeeze=False)[:, 0]
    for axes, layer in zip(panels, layers, strict=True):
        tokens, loads_ER = loads[layer]
        # Each row of metrics covers the tokens since the previous row.
        edges = [0.0, *tokens]
        image = axes.pcolormesh(
            edges, np.arange(len(loads_ER) + 1) - 0.5, loads_ER.clip(0.25, 4.0),
            cmap="RdBu_r", norm=LogNorm(0.25, 4.0), rasterized=True,
        )  # fmt: skip
        axes.set_ylabel(f"layer {layer}\nexpert")
        axes.spines[["top", "right"]].set_visible(False)
        worst = loads_ER.max(0)[-1]
        axes.set_title(f"max/mean {worst:.2f} at the end", loc="right", fontsize="small")
    bar = figure.colorbar(image, ax=list(panels), ticks=[0.25, 0.5, 1, 2, 4], aspect=40)
    bar.ax.set_yticklabels(["≤ 1/4", "1/2", "1", "2", "≥ 4"])
    bar.ax.minorticks_off()
    bar.set_label("tokens of the expert over the mean")
    panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[-1].set_xlabel("consumed tokens")
    if title is not None:
        panels[0].set_title(title, loc="left", fontweight="bold")
    save_picture(figure, output_png)
