"""The update of offloaded states: torch's fused AdamW, which the trainer uses, and DeepSpeed's own.

    python benchmarks/cpu_adam.py --elements 4000000 --steps 20

Both update the same float32 weights by the same gradients, in turn. Prints the CPU time of a step
and the largest difference of the weights. DeepSpeed compiles its optimizer first, with the packages
ninja and a C++ compiler (about a minute; ``TORCH_EXTENSIONS_DIR`` keeps it).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

RATES = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def seconds(optimizer: Optimizer) -> float:
    """Return the CPU time of an update."""
    started = time.process_time()
    optimizer.step()
    return time.process_time() - started


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=4_000_000)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(args.elements, generator=draw)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]

    from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled here

    optimizers: dict[str, Optimizer] = {
        "torch's fused AdamW": torch.optim.AdamW([weights[0]], fused=True, **RATES),
        "DeepSpeedCPUAdam": DeepSpeedCPUAdam([weights[1]], adamw_mode=True, **RATES),
    }
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(args.steps):
        gradient = torch.randn(args.elements, generator=draw)
        for weight, (name, optimizer) in zip(weights, optimizers.items(), strict=True):
            weight.grad = gradient.clone()
            times[name].append(seconds(optimizer))
    ours, theirs = weights
    apart = float((ours - theirs).detach().abs().max())
    moved = float((ours.detach() - start).abs().max())
    print(f"{args.elements:,} weights, {args.steps} steps, torch {torch.__version__}\n")
    print("| | CPU ms a step | range |\n|---|---|---|")
    for name, spent in times.items():
        middle, least, most = (1e3 * f(spent) for f in (statistics.median, min, max))
        print(f"| {name} | {middle:.1f} | {least:.1f}-{most:.1f} |")
    first, second = times.values()
    ratio = statistics.median(a / b for a, b in zip(first, second, strict=True))
    print(f"\nratio of a step, median: {ratio:.2f}")
    print(f"largest difference of the weights: {apart:.2g}, which have moved by up to {moved:.2g}")


if __name__ == "__main__":
    main()
