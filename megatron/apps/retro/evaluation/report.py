"""What an evaluation of retrieval prints and writes: tables, curves, numbers in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.pictures.run_curves import (
    Panel,
    RunCurve,
    draw_panels,
)
from megatron.apps.retro.evaluation.overlap import ChunkScores, ScoresByOverlap
from megatron.apps.retro.evaluation.perplexity import EvaluatedText
from megatron.apps.tasks.report import TaskResult, aligned


def scores_by_dataset(text: EvaluatedText, scores: ChunkScores) -> dict[str, ChunkScores]:
    """The scores of the samples from each dataset of a blend."""
    datasets_N = np.repeat(text.datasets_I, len(scores.tokens_N) // len(text))
    return {str(name): scores.part(datasets_N == name) for name in np.unique(datasets_N)}


def dataset_table(results: Sequence[TaskResult]) -> str:
    """A line for each dataset, a column for each model."""
    names = results[0].details["datasets"]
    rows = [("dataset", "tokens", *(result.name for result in results))]
    for name, numbers in names.items():
        shown = (f"{each.details['datasets'][name]['perplexity']:.5g}" for each in results)
        rows.append((name, f"{numbers['tokens']:,}", *shown))
    return aligned(rows, texts=1)


def with_details(
    result: TaskResult,
    at_most: ScoresByOverlap,
    within: ScoresByOverlap,
    datasets: Mapping[str, ChunkScores],
) -> TaskResult:
    """A result with the numbers of each dataset and of each share, which figures are drawn of."""
    details = {
        "datasets": {
            name: {
                "loss": each.loss,
                "perplexity": each.perplexity,
                "tokens": int(each.tokens_N.sum()),
            }
            for name, each in datasets.items()
        },
        "filtered": _of(result.name, at_most, at_most.bits_per_byte),
        "by_overlap": _of(result.name, within, within.perplexity),
    }
    return replace(result, details=details)


def _of(name: str, found: ScoresByOverlap, values: Mapping[str, Sequence[float]]) -> Any:
    """JSON of one model's numbers; null where there are no chunks."""
    finite = [value if math.isfinite(value) else None for value in values[name]]
    return {"shares": list(found.shares), "chunks": list(found.chunks), "values": finite}


def overlap_table(models: Mapping[str, Mapping[str, Any]], what: str) -> str:
    """A line for each share, a column for each model."""
    first = next(iter(models.values()))[what]
    rows = [("share", "chunks", *models)]
    for place, (share, chunks) in enumerate(zip(first["shares"], first["chunks"], strict=True)):
        values = (each[what]["values"][place] for each in models.values())
        shown = ("" if value is None else f"{value:.5g}" for value in values)
        rows.append((f"{share:.3f}", f"{chunks:,}", *shown))
    return aligned(rows)


def draw(models: Mapping[str, Mapping[str, Any]], output_png: Path) -> None:
    """Draws the numbers of all models over the share of chunks that is in their neighbours."""

    def curves(what: str) -> list[RunCurve]:
        found = []
        for name, each in models.items():
            pairs = zip(each[what]["shares"], each[what]["values"], strict=True)
            points = [(share, value) for share, value in pairs if value is not None]
            if points:
                shares, values = zip(*points, strict=True)
                found.append(RunCurve(name, list(shares), list(values)))
        return found

    panels = [
        Panel("bits per byte, at most this share", curves("filtered")),
        Panel("perplexity, about this share", curves("by_overlap")),
    ]
    draw_panels(panels, output_png, "share of a chunk that is in its neighbours")
