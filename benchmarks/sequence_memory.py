#!/usr/bin/env python
"""Memory of a training step over the length of its sequence, on processes that divide it.

    python benchmarks/sequence_memory.py
    python benchmarks/sequence_memory.py --lengths 65536 --ways long --json out.json
    python benchmarks/sequence_memory.py --picture memory.png

A length at a time is trained for one step by ``pretrain_gpt.py``, once as it is and once in the
ways that save memory. The most memory that was resident in a process of the run is its VmHWM in
/proc, less that of the same run with sequences of 512 tokens: what grows with the length. On a CPU
host memory is the same memory, so that activations there count as others do: what is measured is
recomputation, tiles, and chunks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from machine import machine

from megatron.apps.pictures.length import shown_length
from megatron.apps.pictures.plots import decorate, save_picture

ROOT = Path(__file__).parents[1]
MODEL = (
    "--hidden-size 128 --num-attention-heads 2 --swiglu --logits-chunk-mib 8 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--tokenizer-type NullTokenizer --vocab-size 4096 --mock-data --num-workers 0 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 1 --eval-iters 0 --peak-tflops 1 "
    "--attention-dropout 0 --hidden-dropout 0 --log-interval 1"
).split()
RECOMPUTED = "--recompute-granularity full --checkpoint-in-cpu".split()
WAYS: dict[str, list[str]] = {
    "plain": [],
    "long": [*RECOMPUTED, "--mlp-chunks-for-training", "0"],
    "fpdt": [
        *RECOMPUTED, *"--cp-comm-type a2a --ds-sequence-parallel-fpdt".split(),
        *"--ds-sequence-parallel-fpdt-offloading --ds-sequence-parallel-fpdt-chunk-size".split(),
        "4096",
    ],
}  # fmt: skip
"""Flags of each way to train."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""The memory of a freed tensor leaves the process: what is resident is what is in use."""
BASE = 512
MIB = 2**20


def main() -> int:
    options = parser().parse_args()
    lengths = [int(word) for word in options.lengths.split(",")]
    ways = options.ways.split(",")
    points: dict[str, list[dict[str, Any]]] = {}
    command = " ".join(["python", *sys.argv])
    for way in ways:
        base = measure(way, BASE, options)
        points[way] = []
        for length in lengths:
            point = measure(way, length, options)
            point["grown_mib"] = round(point["peak_mib"] - base["peak_mib"], 1)
            points[way].append(point)
            print(
                f"{way:6} {length:7,} tokens: {point['peak_mib']:8,.0f} MiB in a process, "
                f"{point['grown_mib']:8,.0f} MiB more than {BASE} tokens, "
                f"{point['grown_mib'] * MIB / length:6,.0f} bytes a token, "
                f"{point['cpu_seconds']:,.0f} s of CPU time",
                flush=True,
            )
            if options.json:
                result = {
                    "command": command,
                    "machine": machine(),
                    "processes": options.processes,
                    "layers": options.layers,
                    "base_tokens": BASE,
                    "flags": MODEL,
                    "ways": {name: WAYS[name] for name in points},
                    "points": points,
                }
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.picture:
        draw(points, options.picture)
    return 0


def draw(points: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw what each way's memory has grown by over the tokens of a sequence, and straight lines
    through the longest sequence."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for way, measured in points.items():
        tokens = [point["tokens"] for point in measured]
        grown = [point["grown_mib"] for point in measured]
        (line,) = axes.plot(tokens, grown, marker="o", label=way)
        slope = grown[-1] / tokens[-1]
        axes.plot([0, tokens[-1]], [0, slope * tokens[-1]], ":", color=line.get_color())
    decorate(axes)
    ticks = sorted({point["tokens"] for measured in points.values() for point in measured})
    axes.set_xticks(ticks, [shown_length(n) for n in ticks])
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel(f"MiB a process more than {BASE} tokens")
    axes.legend()
    save_picture(figure, path)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536")
    parser.add_argument("--ways", default="plain,long", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--processes", type=int, default=2, help="that divide a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    return parser


def measure(way: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one step; return the most MiB of a process, the loss and the CPU time of all."""
    flags = [*MODEL, *WAYS[way], "--seq-length", str(length)]
    flags += ["--num-layers", str(options.layers), "--num-gpus-per-node", str(options.processes)]
    flags += ["--context-parallel-size", str(options.processes)]
    if way == "fpdt" and length <= int(WAYS[way][-1]):
        flags += ["--ds-sequence-parallel-fpdt-chunk-size", str(length)]
    peaks: dict[int, int] = {}
    started = os.times()
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *flags],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while run.poll() is None:
            for pid in descendants(run.pid):
                peaks[pid] = max(peaks.get(pid, 0), high_water(pid))
            time.sleep(0.05)
        output.seek(0)
        text = output.read()
    if run.returncode:
        sys.exit(f"{' '.join(flags)}\n{text}")
    ended = os.times()
    loss = next(line for line in text.splitlines() if "lm loss: " in line)
    return {
        "tokens": length,
        "peak_mib": round(max(peaks.values()) / 1024, 1),
        "cpu_seconds": round(sum(ended[2:4]) - sum(started[2:4]), 1),
        "loss": float(loss.split("lm loss: ")[1].split()[0]),
    }


def descendants(pid: int) -> list[int]:
    """A process and those that it started, directly or not."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in descendants(int(child)))]


def high_water(pid: int) -> int:
    """The most memory that was resident in a process, in KiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    sys.exit(main())
