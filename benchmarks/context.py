#!/usr/bin/env python
"""Sequences that two processes divide, against one process: time, traffic and growth.

    python benchmarks/context.py
    python benchmarks/context.py --lengths 1024,4096 --layouts cp2,cp2-a2a --rounds 3
    python benchmarks/context.py --lengths 1024,4096,16384,65536 --plot context.png

At each length one process and the layouts train the same sample in turns, interleaved, one thread a
process: the same work, on twice the processes. Shown are tokens per CPU second of all processes
and per second on the clock, to one process in the same round; the share of CPU time in the threads
of gloo, which send and add what arrives; and the bytes that attention of a step sends, of the rank
that sends most, counted at the collectives, with those of the formulas of
``megatron.features.context.costs``. The benchmark ends with an error if they differ.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from growth import exponent
from layout_shapes import LAYOUTS, Shape
from machine import machine
from trainer_group import TrainerGroup, median_ratio, take_turns
from trainer_worker import Sample

from megatron.apps.parity.layouts import parse_layout
from megatron.features.context.costs import Heads, attention_bytes

NAMES = ("cp2", "cp2-a2a", "cp2-allgather")
FLAGS = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--num-query-groups 2"
).split()
LAYERS, HIDDEN, HEADS = 2, 256, Heads(queries=4, keys=2, width=64)


def main() -> int:
    options = parser().parse_args()
    names = options.layouts.split(",")
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser().error(f"--layouts: {unknown[0]} is none of {', '.join(NAMES)}")
    rows: list[dict[str, Any]] = []
    print(machine(), flush=True)
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    for length in map(int, options.lengths.split(",")):
        for row in measure(length, names, options):
            rows.append(row)
            print(line(row), flush=True)
    print("\n" + growth(rows))
    found = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    wrong = [row for row in rows if row["sent"] != row["formula"]]
    for row in wrong:
        print(f"{row['layout']} at {row['length']}: {row['sent']} bytes sent, {row['formula']} by "
              "the formula", file=sys.stderr)  # fmt: skip
    return 1 if wrong else 0


def measure(length: int, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The numbers of all layouts at a length, those of one process first."""
    shape = Shape(LAYERS, HIDDEN, length, options.vocab_size, micro_batch=1)
    precision = ["--bf16"] if options.dtype == "bf16" else []
    groups: list[TrainerGroup] = []
    try:
        for name in ("dp1", *names):
            groups.append(TrainerGroup(LAYOUTS[name], shape, [*FLAGS, *precision]))
        samples, _ = take_turns(groups, options.rounds, options.seconds)
        sent = [max(group.ask("sent")) for group in groups]
        memory = [group.memory()[0] for group in groups]
    finally:
        for group in groups:
            group.close()
    size = 2 if options.dtype == "bf16" else 4
    return [
        numbers(name, length, taken, samples[0])
        | {"sent": bytes_sent, "formula": formula(name, length, size), "peak_bytes": peak}
        for name, taken, bytes_sent, peak in zip(
            ("dp1", *names), samples, sent, memory, strict=True
        )
    ]


def formula(name: str, length: int, size: int) -> float:
    """Bytes of attention in a step of one sample, of the rank that sends most."""
    layout = parse_layout(name)
    return LAYERS * sum(attention_bytes(layout, HEADS, length // layout.context, size))


def numbers(name: str, length: int, samples: list[Sample], alone: list[Sample]) -> dict[str, Any]:
    """Medians over rounds; ratios are those of tokens per second to one process."""
    median = statistics.median
    cpu, wall = ([getattr(s, key) / s.steps for s in samples] for key in ("cpu", "wall"))
    of_one = [[getattr(s, key) / s.steps for s in alone] for key in ("cpu", "wall")]
    return {
        "layout": name,
        "length": length,
        "cpu_seconds": median(cpu),
        "wall_seconds": median(wall),
        "cpu_ratio": median_ratio(of_one[0], cpu),
        "wall_ratio": median_ratio(of_one[1], wall),
        "gloo_share": median(s.gloo / s.cpu for s in samples),
        "loss": samples[-1].loss,
    }


HEAD = (
    "tokens", "layout", "CPU ms a step", "wall ms", "tokens per CPU s, to one process",
    "tokens per s", "gloo's threads", "KiB sent", "by formula", "peak MiB",
)  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    cells = (
        f"{row['length']:,}", row["layout"], f"{1e3 * row['cpu_seconds']:,.0f}",
        f"{1e3 * row['wall_seconds']:,.0f}", f"{row['cpu_ratio']:.2f}", f"{row['wall_ratio']:.2f}",
        f"{row['gloo_share']:.1%}", f"{row['sent'] / 1024:,.0f}", f"{row['formula'] / 1024:,.0f}",
        f"{row['peak_bytes'] / 2**20:,.0f}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def growth(rows: list[dict[str, Any]]) -> str:
    """Print the growth of time with the length, of each layout; empty at one length."""
    lines = []
    for name in dict.fromkeys(row["layout"] for row in rows):
        points = [(row["length"], row["cpu_seconds"]) for row in rows if row["layout"] == name]
        if len(points) > 1:
            lines.append(f"{name}: CPU time grows as the power {exponent(points):.2f} of tokens")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of seconds and of bytes over the length."""
    from pictures import new_figure, save

    figure = new_figure(3.4)
    time, sent = figure.subplots(1, 2)
    for name in dict.fromkeys(row["layout"] for row in rows):
        of_layout = [row for row in rows if row["layout"] == name]
        lengths = [row["length"] for row in of_layout]
        time.plot(lengths, [row["cpu_seconds"] for row in of_layout], "o-", label=name)
        if name != "dp1":
            mib = [row["sent"] / 2**20 for row in of_layout]
            sent.plot(lengths, mib, "o-", label=f"{name}, counted")
            formula = [row["formula"] / 2**20 for row in of_layout]
            sent.plot(lengths, formula, "k:", linewidth=1)
    time.set_ylabel("CPU seconds a step, all processes")
    sent.set_ylabel("MiB that a rank sends in attention (dotted: formulas)")
    for axes in (time, sent):
        axes.set_xlabel("tokens of a sequence")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.legend(frameon=False)
        axes.grid(axis="y", which="major", alpha=0.3)
    save(figure, path)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--lengths", default="1024,4096,16384", help="tokens of a sequence, with commas between")
    add("--layouts", default=",".join(NAMES), help=f"of {', '.join(NAMES)}, with commas between")
    add("--vocab-size", type=int, default=4096, help="tokens of the vocabulary")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="dtype (bf16)")
    add("--rounds", type=int, default=3, help="rounds that are measured")
    add("--seconds", type=float, default=1.0, help="about how many CPU seconds a turn takes")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--plot", type=Path, metavar="FILE", help="write a picture of time and traffic")
    return result


if __name__ == "__main__":
    sys.exit(main())
