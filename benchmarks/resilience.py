"""What the checks of unattended runs cost: CPU time of steps with and without them, in turns within
one training.

``python benchmarks/resilience.py --processes 1 2 4`` prints a row for each number of processes: the
median over rounds of the quotient of CPU times, with its quartiles, and the CPU time of the
watchdog's threads, which run in both, as a share of that of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --lr 1e-4 "
    "--micro-batch-size 2 --global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 999 "
    "--mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --train-iters 1000000 "
    "--log-interval 1000000"
).split()
CHECKS = ("Stragglers", "SpikeGuard")
"""The callbacks that come with every step; replicas are compared when something is saved."""


def rank_main(rounds: int, steps: int) -> None:
    """A rank: trains in turns; rank 0 prints what all needed."""
    import torch
    import torch.distributed as dist

    from megatron.training.build import build_trainer
    from megatron.training.process import connected
    from megatron.training.run import parse_run

    run = parse_run(None, FLAGS)
    with connected(run) as mesh:
        trainer = build_trainer(run, mesh)
        every = trainer.callbacks
        without = tuple(c for c in every if type(c).__name__ not in CHECKS)
        assert len(every) - len(without) == (2 if mesh.world.size > 1 else 1)
        batches = trainer.data.batches(trainer.data.datasets.train, **trainer.reading())

        def turn(on: bool) -> tuple[float, float]:
            """CPU seconds of all ranks, and of them those of the watchdog's threads."""
            trainer.callbacks = every if on else without
            beside, cpu = watchdog_seconds(), time.process_time()
            for _ in range(steps):
                trainer.step(batches)
                trainer._between_steps()
            seconds = time.process_time() - cpu, watchdog_seconds() - beside
            for callback in every:
                meter: Any = getattr(callback, "_meter", None)
                if meter is not None:  # its thread ends; the next step starts another
                    meter.close()
                    callback._meter = type(meter)()  # type: ignore[attr-defined]
            found = torch.tensor(seconds, dtype=torch.float64)
            if mesh.world.size > 1:
                dist.all_reduce(found)
            return found[0].item(), found[1].item()

        turn(True)
        ratios, shares, ms = [], [], []
        for number in range(rounds):
            order = (True, False) if number % 2 else (False, True)
            found = {on: turn(on) for on in order}
            cpu, beside = map(sum, zip(*found.values(), strict=True))
            ratios.append(found[True][0] / found[False][0])
            shares.append(beside / cpu)
            ms.append(1000 * found[False][0] / steps)
        if mesh.world.rank == 0:
            quartiles = statistics.quantiles(ratios, n=4)
            row = [mesh.world.size, statistics.median(ms), *quartiles, statistics.median(shares)]
            print("ROW", json.dumps(row), flush=True)
        os._exit(0)


def watchdog_seconds() -> float:
    """CPU seconds so far of the threads that the checks have, but that of :data:`CHECKS`."""
    found = 0.0
    for thread in threading.enumerate():
        if "watchdog" in thread.name or "exchange" in thread.name:
            path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            found += int(path.read_text().split()[0]) / 1e9
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options.rounds, options.steps)
        return
    print("| processes | CPU ms a step | with / without: quartiles | watchdog, share |")
    print("|---|---|---|---|")
    for size in options.processes:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env=os.environ
                | {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
                },
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        lines = "".join(process.communicate()[0] for process in ranks).splitlines()
        (row,) = (json.loads(line[4:]) for line in lines if line.startswith("ROW "))
        number, ms, low, middle, high, share = row
        print(
            f"| {number} | {ms:.1f} | {low:.4f} {middle:.4f} {high:.4f} | {share:.5f} |", flush=True
        )


if __name__ == "__main__":
    main()
