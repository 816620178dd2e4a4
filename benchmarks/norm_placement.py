#!/usr/bin/env python
"""Losses of BERTs of several depths with the norms before each sublayer, and after it.

    python benchmarks/norm_placement.py --data data/corpus_text_sentence --vocab-file vocab.txt
    python benchmarks/norm_placement.py --data ... --vocab-file ... --depths 24 --rates 1e-4 1e-3

Pre-norm is Megatron's order, post-norm (--apply-residual-connection-post-layernorm) that of the
first BERT. Both have the same initial weights, batches and learning rates.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from trainings import add_data, data_flags, losses_of, new_parser

from megatron.run.run import parse_run

MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0 --micro-batch-size 8 --bert-no-binary-head "
    "--tokenizer-type BertWordPieceLowerCase --split 100,0,0 --lr-decay-style linear "
    "--lr-warmup-fraction 0.1 --weight-decay 0.01 --eval-iters 0 --num-workers 0 "
    "--log-interval 100000 --peak-tflops 1 --zero-stage 0 --no-check-for-nan-in-loss-and-grad"
).split()
PLACES = {"pre-norm": [], "post-norm": ["--apply-residual-connection-post-layernorm"]}
LAST = 50
"""Steps at the end whose mean is shown."""


def main() -> int:
    options = parser().parse_args()
    data = data_flags(options)
    cases = list(product(PLACES, options.depths, options.rates))
    argvs = [
        [*MODEL, *PLACES[place], "--num-layers", str(depth), "--lr", str(rate), *data]
        for place, depth, rate in cases
    ]
    with ProcessPoolExecutor(
        options.processes, get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        losses = list(pool.map(train, argvs))
    rows = [
        {"norm": place, "depth": depth, "rate": rate, "losses": found}
        for (place, depth, rate), found in zip(cases, losses, strict=True)
    ]
    print(table(rows))
    if options.plot:
        plot(rows, Path(options.plot))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return 0


def train(argv: Sequence[str]) -> list[float]:
    """Losses of all steps."""
    torch.set_num_threads(1)
    return losses_of(parse_run(None, argv, "bert"))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The last losses, a line for each depth and rate."""
    lines = [f"| layers | learning rate | {' | '.join(PLACES)} |", "|---|---|---|---|"]
    for depth, rate in sorted({(row["depth"], row["rate"]) for row in rows}):
        found = {
            row["norm"]: statistics.mean(row["losses"][-LAST:])
            for row in rows
            if (row["depth"], row["rate"]) == (depth, rate)
        }
        shown = " | ".join(f"{found[place]:.3f}" for place in PLACES)
        lines.append(f"| {depth} | {rate:g} | {shown} |")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a panel for each depth."""
    from pictures import FIRST, SECOND, new_figure, save

    depths = sorted({row["depth"] for row in rows})
    styles = dict(zip(dict.fromkeys(row["rate"] for row in rows), ("-", "--", ":"), strict=False))
    colors = dict(zip(PLACES, (FIRST, SECOND), strict=True))
    figure = new_figure(3.4)
    panels = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
    for depth, axes in zip(depths, panels, strict=True):
        for row in rows:
            if row["depth"] == depth:
                axes.plot(
                    *smooth(row["losses"]),
                    styles[row["rate"]],
                    color=colors[row["norm"]],
                    label=f"{row['norm']}, {row['rate']:g}",
                )
        axes.set_title(f"{depth} layers", loc="left")
        axes.set_xlabel("step")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("masked-token loss, nats")
    panels[-1].legend(frameon=False, title="norm, learning rate")
    save(figure, path)


def smooth(losses: Sequence[float], width: int = 10) -> tuple[list[int], list[float]]:
    """Means of ``width`` steps, at their last one; NaN where a loss is."""
    ends = range(width, len(losses) + 1, width)
    return list(ends), [
        statistics.mean(part) if all(map(math.isfinite, part)) else math.nan
        for part in (losses[end - width : end] for end in ends)
    ]


def parser() -> argparse.ArgumentParser:
    result = new_parser(__doc__, steps=400)
    add_data(result)
    result.add_argument("--depths", nargs="+", type=int, default=[4, 12, 24])
    result.add_argument("--rates", nargs="+", type=float, default=[1e-3])
    result.add_argument("--processes", type=int, default=1, help="trainings at the same time")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
