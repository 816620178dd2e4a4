#!/usr/bin/env python
"""Growth of a step's time and memory with the work, measured and by formula.

    python benchmarks/growth.py
    python benchmarks/growth.py --vary depth,vocabulary --json out.json --plots docs

One size is varied at a time, the others stay. The trainers of all its values are built once and
take turns, one thread each.

Time: CPU seconds of a step next to FLOPs / rate, where the rate is that of the step's own matrix
products at their own shapes, done by themselves in the same turn. What lies between the two is
everything that is no matrix product. How it grows is the exponent of a power law, fitted to both.
Memory: the most bytes that were resident beyond those before there was a model, less the same of a
model of next to nothing, next to the estimate of ``megatron.apps.planning`` for the rank that needs
most, by which tools/plan.py plans.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from layout_shapes import LAYOUTS, LayoutFlags, Shape
from machine import machine
from trainer_group import TrainerGroup, take_turns
from trainer_worker import Sample

VARIED: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "depth": ("layers", (2, 4, 8, 16), {}),
    "width": ("hidden", (128, 256, 512, 1024), {}),
    "sequence": ("sequence", (128, 256, 512, 1024), {"micro_batch": 2}),
    "vocabulary": ("vocabulary", (4096, 8192, 16384, 32768), {}),
    "micro-batch": ("micro_batch", (1, 2, 4, 8), {}),
}
"""Values of each kind of growth: the field of :class:`Shape`, its values, and what else is
fixed."""

UNITS = {
    "depth": "blocks",
    "width": "hidden size",
    "sequence": "tokens of a sample",
    "vocabulary": "tokens of the vocabulary",
    "micro-batch": "samples of a micro batch",
    "layout": "layout",
}
GROWN_LAYOUTS = ("dp1", "dp2", "tp2", "pp2", "tp2-dp2")
BASE = Shape(micro_batch=4)
NOTHING = Shape(layers=1, hidden=64, sequence=64, vocabulary=128, micro_batch=1)
MIB = 2**20


def main() -> int:
    options = parser().parse_args()
    kinds = [name.strip() for name in options.vary.split(",")]
    unknown = [name for name in kinds if name not in UNITS]
    if unknown:
        parser().error(f"--vary: {unknown[0]} is none of {', '.join(UNITS)}")
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "growth": {},
    }
    print(found["machine"])
    for kind in kinds:
        points = measure(cases(kind), options.rounds, options.seconds)
        found["growth"][kind] = points
        print("\n" + report(kind, points), flush=True)
        # After each, since all of them take a while.
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        if options.plots:
            from growth_plots import plot

            plot(UNITS[kind], points, options.plots / f"growth-{kind}.png")
    return 0


def cases(kind: str) -> list[tuple[int | str, LayoutFlags, Shape]]:
    """The values of one kind of growth, with the layout and shape of each."""
    if kind == "layout":
        return [(name, LAYOUTS[name], BASE) for name in GROWN_LAYOUTS]
    field, values, fixed = VARIED[kind]
    return [
        (value, LAYOUTS["dp1"], dataclasses.replace(BASE, **{**fixed, field: value}))
        for value in values
    ]


def measure(
    work: list[tuple[int | str, LayoutFlags, Shape]], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Each case's numbers: medians over rounds, and the peak of memory."""
    own = process_bytes()
    groups: list[TrainerGroup] = []
    try:
        for _, layout, shape in work:
            groups.append(TrainerGroup(layout, shape, ["--bf16"]))
        for group in groups:
            group.run(2)
        # Before products are timed in the same processes.
        memory = [group.memory() for group in groups]
        samples, floors = take_turns(groups, rounds, seconds, alongside="products")
    finally:
        for group in groups:
            group.close()
    return [
        {"value": value, "shape": dataclasses.asdict(shape), "layout": layout.name}
        | point(taken, [layout.replicas * floor for floor in below], measured - own, estimate)
        for (value, layout, shape), taken, below, (measured, estimate) in zip(
            work, samples, floors, memory, strict=True
        )
    ]


def process_bytes() -> int:
    """Memory of a process that trains next to nothing: libraries that are loaded while a model is
    built, their caches and generated kernels."""
    group = TrainerGroup(LAYOUTS["dp1"], NOTHING, ["--bf16"])
    try:
        group.run(2)
        return group.memory()[0]
    finally:
        group.close()


def point(
    samples: list[Sample], floors: list[float], measured: float, estimate: float
) -> dict[str, float]:
    """The numbers of one case.

    Args:
        samples: its turns.
        floors: CPU seconds of a step's matrix products, of each turn.
        measured: bytes at the peak.
        estimate: bytes by the formula.
    """
    return {
        "cpu_seconds": statistics.median(sample.cpu / sample.steps for sample in samples),
        "formula_seconds": statistics.median(floors),
        "ratio": statistics.median(
            sample.cpu / sample.steps / floor for sample, floor in zip(samples, floors, strict=True)
        ),
        "bytes": measured,
        "formula_bytes": estimate,
    }


def exponent(points: list[tuple[float, float]]) -> float:
    """The p of y = c x^p that fits best, by least squares of the logarithms.

    Raises:
        ValueError: there are fewer than two values of x, or one that is not positive.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x = statistics.mean(x for x, _ in logs)
    mean_y = statistics.mean(y for _, y in logs)
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    if not spread:
        raise ValueError("an exponent needs values of at least two sizes")
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def report(kind: str, points: list[dict[str, Any]]) -> str:
    """The table of one kind of growth, in Markdown, and its exponents."""
    head = (
        UNITS[kind], "CPU ms a step", "FLOPs / rate, ms", "measured / formula", "of the first",
        "memory MiB", "formula MiB", "error",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    first = points[0]["ratio"]
    for each in points:
        value = each["value"]
        cells = (
            value if isinstance(value, str) else f"{value:,}",
            f"{1e3 * each['cpu_seconds']:,.0f}",
            f"{1e3 * each['formula_seconds']:,.0f}",
            f"{each['ratio']:.2f}",
            f"{each['ratio'] / first:.2f}",
            f"{each['bytes'] / MIB:,.0f}",
            f"{each['formula_bytes'] / MIB:,.0f}",
            f"{each['bytes'] / each['formula_bytes'] - 1:+.0%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    fixed = Shape(**points[0]["shape"]).name
    title = f"{kind}: others as in {fixed}"
    if kind == "layout":
        return "\n".join([title, "", *lines])
    return "\n".join([title, "", *lines, "", exponents(points)])


def exponents(points: list[dict[str, Any]]) -> str:
    """Return the exponents of time and memory, measured and by the formula."""

    def fitted(key: str) -> float:
        return exponent([(each["value"], each[key]) for each in points])

    return (
        f"grows as the power {fitted('cpu_seconds'):.2f} in time, the formula as "
        f"{fitted('formula_seconds'):.2f}; {fitted('bytes'):.2f} in memory, the formula as "
        f"{fitted('formula_bytes'):.2f}"
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--vary", default=",".join(UNITS), help=f"what grows, of {', '.join(UNITS)}")
    add("--rounds", type=int, default=5, help="rounds that are measured")
    add(
        "--seconds",
        type=float,
        default=2.0,
        help="CPU seconds of a trainer's turn, about",
    )
    add("--json", type=Path, metavar="FILE", help="write what was measured")
    add("--plots", type=Path, metavar="FOLDER", help="write a plot of each, growth-<name>.png")
    return result


if __name__ == "__main__":
    sys.exit(main())
