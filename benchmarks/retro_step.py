#!/usr/bin/env python
"""Time of a Retro's training step, next to that of the GPT in it.

    python benchmarks/retro_step.py
    python benchmarks/retro_step.py --layers 12 --hidden-size 512 --rounds 9 --json out.json

GPT and Retros are built once, each in a process, and take turns (trainer_group.py). Next to the
measured ratio is that of the FLOPs, attention counted whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from layout_shapes import LAYOUTS, Shape
from trainer_group import TrainerGroup, take_turns
from trainer_worker import Sample

from megatron.families import family_of
from megatron.run.run import parse_run

RETRO = (
    "--model-family retro --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0"
).split()
MODELS = {
    "GPT": [],
    "Retro, 2 neighbours of 128 tokens": RETRO,
    "Retro, 1 neighbour of 128 tokens": [*RETRO, "--retro-num-neighbors", "1"],
    "Retro, 2 of 64, without their continuation": [*RETRO, "--retro-num-retrieved-chunks", "1"],
}
"""Flags of each; the first is what the others are compared with."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    shape = Shape(
        options.layers, options.hidden_size, options.seq_length, micro_batch=options.micro_batch
    )
    print(shape.name)
    flops = [flops_of(shape, flags) for flags in MODELS.values()]
    groups: list[TrainerGroup] = []
    try:
        groups += (TrainerGroup(LAYOUTS["dp1"], shape, flags) for flags in MODELS.values())
        samples, _ = take_turns(groups, options.rounds, options.seconds)
        parameters = [group.parameters for group in groups]
    finally:
        for group in groups:
            group.close()
    print(table(samples, parameters, flops))
    if options.json:
        seconds = {
            name: [sample.cpu / sample.steps for sample in found]
            for name, found in zip(MODELS, samples, strict=True)
        }
        Path(options.json).write_text(json.dumps({"shape": shape.name, "seconds": seconds}))
    return 0


def flops_of(shape: Shape, flags: Sequence[str]) -> float:
    """Model FLOPs of a sample."""
    run = parse_run(None, [*shape.flags(1), *flags])
    model = run.config.model
    return family_of(model.family).shape(model, run.config).flops_per_step(1, causal=False)


def table(
    samples: Sequence[Sequence[Sample]], parameters: Sequence[int], flops: Sequence[float]
) -> str:
    """A row for each model: median and range of its rounds, and the median of the ratios to the
    first model in the same round."""
    lines = [
        "| | parameters | CPU ms a step | range | / GPT | FLOPs / GPT |",
        "|---|---|---|---|---|---|",
    ]
    base = [sample.cpu / sample.steps for sample in samples[0]]
    for name, found, count, work in zip(MODELS, samples, parameters, flops, strict=True):
        each = [sample.cpu / sample.steps for sample in found]
        ratio = statistics.median(own / gpt for own, gpt in zip(each, base, strict=True))
        middle = statistics.median(each)
        lines.append(
            f"| {name} | {count / 1e6:.1f} M | {1e3 * middle:.0f} | {1e3 * min(each):.0f} to "
            f"{1e3 * max(each):.0f} | {ratio:.2f} | {work / flops[0]:.2f} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--layers", type=int, default=6, help="blocks of the GPT (6)")
    result.add_argument("--hidden-size", type=int, default=256, help="its width (256)")
    result.add_argument("--seq-length", type=int, default=256, help="tokens of a sample (256)")
    result.add_argument("--micro-batch", type=int, default=4, help="samples of a step (4)")
    result.add_argument("--rounds", type=int, default=5, help="turns of each model (5)")
    result.add_argument("--seconds", type=float, default=2.0, help="CPU seconds of a turn (2)")
    result.add_argument("--json", metavar="FILE", help="also write the seconds of every round")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
