#!/usr/bin/env python
"""Cost of a lost rank, by the way in which the run starts again: seconds from SIGKILL to the end of
the first new step, and steps that are computed again.

    python benchmarks/restarts.py
    python benchmarks/restarts.py --rounds 7 --processes 4 --json out.json

Each round measures every way once, in another order: one rank of a run is killed at a random
moment, always the last one. A run that is started again by hand is started as soon as all its
processes have ended, which nobody can do faster.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PATIENCE = 240.0
"""Seconds within which anything happens."""
WAYS = ("by hand", "torchrun", "in process", "in process, memory")
DISK, MEMORY = 50, 5
"""Iterations between checkpoints on disk, and in memory."""


class Started:
    """A run under way."""

    def __init__(self, way: str, processes: int, folder: Path, flags: Sequence[str]) -> None:
        self.way, self.processes, self.output = way, processes, folder / "output"
        self._command = [str(ROOT / "pretrain_gpt.py"), *flags]
        kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self._environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.launched: list[psutil.Popen] = []
        self.start()

    def start(self) -> None:
        """Starts the processes, or their launcher."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = (
            [{}] if self.way == "torchrun" else [{"RANK": str(n)} for n in range(self.processes)]
        )
        shared = {"WORLD_SIZE": str(self.processes), "MASTER_ADDR": "127.0.0.1"}
        start = [sys.executable]
        if self.way == "torchrun":
            start = [str(BIN / "torchrun"), "--nproc-per-node", str(self.processes)]
            start += ["--max-restarts", "3", "--rdzv-backend", "c10d"]
            start += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.1"]
        self.launched = []
        for rank in ranks:
            own = rank and {**rank, "LOCAL_RANK": rank["RANK"], **shared, "MASTER_PORT": port}
            with open(self.output, "a") as file:
                self.launched.append(
                    psutil.Popen(
                        [*start, *self._command],
                        env=self._environment | own,
                        cwd=ROOT, stdout=file, stderr=file,
                    )
                )  # fmt: skip

    def victim(self) -> psutil.Process:
        """The process that trains as the last rank."""
        last = self.launched[-1]
        if self.way == "by hand":
            return last
        return sorted(last.children(), key=lambda child: child.pid)[-1]

    def steps(self) -> list[int]:
        """Steps of all lines, in their order."""
        return [int(step) for step in re.findall(r"iteration +(\d+)/", self.output.read_text())]

    def wait_for(self, lines: int) -> float:
        """When the run has printed so many lines of steps; it is started again if it has ended."""
        end = time.monotonic() + PATIENCE
        while len(self.steps()) < lines:
            assert time.monotonic() < end, self.output.read_text()[-3000:]
            if self.way == "by hand" and all(each.poll() is not None for each in self.launched):
                self.start()
            time.sleep(0.01)
        return time.monotonic()

    def stop(self) -> None:
        """Ends all processes."""
        for launched in self.launched:
            if launched.poll() is None:
                for process in [*launched.children(recursive=True), launched]:
                    process.kill()
            launched.wait()


def measure(way: str, folder: Path, options: argparse.Namespace, chance: random.Random) -> dict:
    """Seconds and steps that one killed rank costs."""
    folder.mkdir()
    flags = (
        f"--num-layers {options.layers} --hidden-size {options.hidden_size} "
        f"--num-attention-heads 4 --seq-length {options.seq_length} --lr 1e-3 "
        "--tokenizer-type NullTokenizer --vocab-size 999 --mock-data --num-workers 0 "
        f"--micro-batch-size 1 --global-batch-size {options.processes} --zero-stage 1 "
        "--eval-iters 0 --peak-tflops 1 --train-iters 100000 --log-interval 1 "
        f"--save {folder / 'save'} --load {folder / 'save'} --save-interval {DISK} --keep-last 2 "
    )
    if way.startswith("in process"):
        flags += "--inprocess-restart "
    if way.endswith("memory"):
        flags += f"--non-persistent-save-interval {MEMORY} --replication-factor 1 "
    run = Started(way, options.processes, folder, flags.split())
    try:
        run.wait_for(DISK + chance.randrange(5, DISK - 5))
        began = time.monotonic()
        run.victim().send_signal(signal.SIGKILL)
        while "resumed from" not in run.output.read_text():
            run.wait_for(0)
            assert time.monotonic() < began + PATIENCE, run.output.read_text()[-3000:]
            if way == "by hand" and all(each.poll() is not None for each in run.launched):
                run.start()
            time.sleep(0.01)
        before = run.output.read_text().partition("resumed from")[0]
        lines = len(re.findall(r"iteration +(\d+)/", before))
        seconds = run.wait_for(lines + 1) - began
        steps = run.steps()
        return {"seconds": seconds, "again": steps[lines - 1] - steps[lines] + 1}
    finally:
        run.stop()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args(argv)
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    chance = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="restarts-benchmark-") as work:
        for number in range(options.rounds):
            for way in chance.sample(WAYS, len(WAYS)):
                folder = Path(work) / f"{number} {way}".replace(" ", "-").replace(",", "")
                found[way].append(measure(way, folder, options, chance))
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    print("| started again | seconds | from | to | steps again |\n|---|---|---|---|---|")
    for way, costs in found.items():
        seconds = [cost["seconds"] for cost in costs]
        again = statistics.mean(cost["again"] for cost in costs)
        print(
            f"| {way} | {statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f} "
            f"| {again:.0f} |"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
