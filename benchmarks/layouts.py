#!/usr/bin/env python
"""Cost of a layout: CPU seconds a token over several processes, against one process.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --layouts dp1,tp2 --hidden-size 1024 --json out.json
    python benchmarks/layouts.py --layouts dp1,dp2 --profile

Every layout is a group of processes of this trainer, of one thread each, that is built once. The
groups then train in turns, one group at a time, for several rounds. Every process takes the same
micro batch, so that more replicas mean more tokens a step and other layouts the same tokens in more
processes. Shown are medians over the rounds; the ratio to one process is that of the same round.
"2 x dp1" are two trainings of one process next to each other, which know nothing of each other:
their ratio is what sharing memory and caches leaves of a core, and no layout can be expected above
it.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from layout_shapes import LAYOUTS, Shape
from machine import machine
from trainer_group import TrainerGroup, as_json, median_ratio, take_turns
from trainer_worker import Sample

DEFAULT = "dp1,2 x dp1,dp2,dp2-zero2,dp2-zero3,tp2,tp2-sp,pp2,dp4,tp2-dp2,pp2-tp2"


def main() -> int:
    options = parser().parse_args()
    names = [name.strip() for name in options.layouts.split(",")]
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown:
        parser().error(f"--layouts: {unknown[0]} is none of {', '.join(LAYOUTS)}")
    if "dp1" not in names:
        names.insert(0, "dp1")
    shape = Shape(
        options.layers,
        options.hidden_size,
        options.seq_length,
        options.vocab_size,
        options.micro_batch_size,
        options.micro_batches,
    )
    more = options.flags.split()
    groups: list[TrainerGroup] = []
    try:
        for name in names:
            groups.append(TrainerGroup(LAYOUTS[name], shape, ["--bf16", *more]))
        samples, _ = take_turns(groups, options.rounds, options.seconds)
        if options.profile:
            for group in groups:
                show_profile(group, options.profile)
    finally:
        for group in groups:
            group.close()
    found = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "shape": shape.__dict__,
        "rows": rows(groups, samples),
        "samples": {
            group.layout.name: as_json(s) for group, s in zip(groups, samples, strict=True)
        },
    }
    print(markdown(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def rows(groups: list[TrainerGroup], samples: list[list[Sample]]) -> list[dict[str, Any]]:
    """Each layout's numbers, medians over its rounds."""
    single = next(place for place, group in enumerate(groups) if group.layout.name == "dp1")
    base = [sample.cpu / sample.steps / groups[single].tokens for sample in samples[single]]
    found = []
    for group, taken in zip(groups, samples, strict=True):
        cpu = [sample.cpu / sample.steps / group.tokens for sample in taken]
        median = statistics.median
        ratios = [b / c for b, c in zip(base, cpu, strict=True)]
        found.append(
            {
                "layout": group.layout.name,
                "processes": group.layout.processes * group.layout.copies,
                "tokens": group.tokens,
                "cpu_ms_per_step": 1e3 * median(s.cpu / s.steps for s in taken),
                "wall_ms_per_step": 1e3 * median(s.wall / s.steps for s in taken),
                "cpu_us_per_token": 1e6 * median(cpu),
                "ratio": median_ratio(base, cpu),
                "ratio_range": [min(ratios), max(ratios)],
                "gloo_share": median(s.gloo / s.cpu for s in taken),
                "system_share": median(s.system / s.cpu for s in taken),
                "rss_mib": max(s.rss for s in taken) / 2**20,
            }
        )
    return found


def markdown(found: dict[str, Any]) -> str:
    """The table."""
    head = (
        "layout", "processes", "tokens a step", "CPU ms a step", "wall ms a step", "CPU us a token",
        "tokens per CPU s, to one process", "(range)", "gloo's threads", "kernel", "peak RSS MiB",
    )  # fmt: skip
    lines = [" | ".join(["", *head, ""]).strip(), "|".join(["", *["---"] * len(head), ""])]
    for row in found["rows"]:
        low, high = row["ratio_range"]
        cells = (
            row["layout"], str(row["processes"]), f"{row['tokens']:,}",
            f"{row['cpu_ms_per_step']:,.0f}", f"{row['wall_ms_per_step']:,.0f}",
            f"{row['cpu_us_per_token']:.1f}", f"{row['ratio']:.3f}", f"{low:.2f}-{high:.2f}",
            f"{row['gloo_share']:.1%}", f"{row['system_share']:.1%}", f"{row['rss_mib']:,.0f}",
        )  # fmt: skip
        lines.append(" | ".join(["", *cells, ""]).strip())
    shape = Shape(**found["shape"])
    return "\n".join([f"{shape.name}; {found['machine']}", "", *lines])


def show_profile(group: TrainerGroup, steps: int) -> None:
    """The operators that take most of the first process's time."""
    entries = group.ask("profile", steps)[0]
    total = sum(seconds for _, _, seconds in entries)
    print(f"\n{group.layout.name}: {1e3 * total / steps:.1f} ms a step in operators of process 0")
    for name, count, seconds in entries[:25]:
        print(f"  {1e3 * seconds / steps:8.2f} ms {seconds / total:6.1%} {count / steps:8g} {name}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--layouts", default=DEFAULT, help=f"names with commas between, of {', '.join(LAYOUTS)}")
    add("--layers", type=int, default=4, help="blocks of the model")
    add("--hidden-size", type=int, default=256, help="its width; heads are 64 wide")
    add("--seq-length", type=int, default=256, help="tokens of a sample")
    add("--vocab-size", type=int, default=8192, help="tokens of the vocabulary")
    add("--micro-batch-size", type=int, default=8, help="samples of a micro batch")
    add("--micro-batches", type=int, default=1, help="micro batches of a step")
    add("--flags", default="", help="further flags of the trainer, in one argument")
    add("--rounds", type=int, default=7, help="rounds that are measured")
    add(
        "--seconds", type=float, default=4.0, help="about how many CPU seconds a group's turn takes"
    )
    add("--profile", type=int, default=0, metavar="STEPS", help="show where operators' time goes")
    add("--json", type=Path, metavar="FILE", help="write every measurement")
    return result


if __name__ == "__main__":
    sys.exit(main())
