#!/usr/bin/env python
"""Cost of the checks of unattended runs at their defaults: CPU time of the steps of one training.

    python benchmarks/resilience.py
    python benchmarks/resilience.py --processes 2 --models tiny --rounds 40

Two measures follow from the same steps. The threads of the checks and what the main thread does for
them have clocks of their own; their sum is shown as a share of the steps. Steps with and without
the checks take turns, too, and the quotient of their CPU times has all that the clocks may miss,
but the noise of the machine as well. The comparison of replicas, which precedes every save, is
shown next to a step and a save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COMMON = (
    "--lr 1e-4 --tokenizer-type NullTokenizer --mock-data --num-workers 0 --eval-iters 0 --bf16 "
    "--peak-tflops 1 --train-iters 1000000 --log-interval 1000000 --zero-stage 1 "
)
MODELS = {
    "tiny": (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 999 "
        "--micro-batch-size 2 --global-batch-size 8",
        40,
    ),
    "17M": (
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
        "--vocab-size 8191 --micro-batch-size 2 --global-batch-size 8",
        1,
    ),
}
"""Flags of each model, and the number of steps of a turn."""
CHECKS = ("Stragglers", "SpikeGuard", "ReplicaCheck")
THREADS = ("watchdog", "exchange", "own time")
"""Names of the threads of the checks; what the store does for them is a thread of torch's."""
STORE = "pt_tcpstore"


class Costs(NamedTuple):
    """CPU seconds of all ranks; all but the first are parts of that."""

    whole: float
    watching: float
    """Seconds of the watchdog, its exchange, and the store."""
    looking: float
    """Seconds of the thread that tells own time from waiting."""
    calls: float
    """Seconds of the callbacks, in the main thread."""

    @property
    def checks(self) -> float:
        return self.watching + self.looking + self.calls


def rank_main(model: str, rounds: int, save: str) -> None:
    """A rank: trains in turns; rank 0 prints what all needed."""
    import torch
    import torch.distributed as dist

    from megatron.features.resilience.steps.replicas import ReplicaCheck
    from megatron.run.process import connected
    from megatron.run.run import parse_run
    from megatron.training.build import build_trainer
    from megatron.training.checkpoints import CheckpointManager
    from megatron.training.stopping import NonFiniteGuard

    flags, steps = MODELS[model]
    run = parse_run(None, [*COMMON.split(), *flags.split(), "--save", save])
    with connected(run) as mesh:
        trainer = build_trainer(run, mesh)
        every = trainer.callbacks
        without = tuple(c for c in every if type(c).__name__ not in CHECKS)
        assert len(every) - len(without) == (3 if mesh.world.size > 1 else 2)
        meter = Meter()
        for callback in every:
            if callback not in without:
                meter.follow(callback)
        (steps_read,) = (c for c in every if isinstance(c, NonFiniteGuard))
        assert steps_read.judge_finite is not None
        judge = meter.counted(steps_read.judge_finite)
        batches = trainer.data.batches(trainer.data.datasets.train, **trainer.reading())

        def summed(values: tuple[float, ...]) -> list[float]:
            found = torch.tensor(values, dtype=torch.float64)
            if mesh.world.size > 1:
                dist.all_reduce(found)
            return found.tolist()

        def turn(on: bool, number: int = steps) -> Costs:
            trainer.callbacks = every if on else without
            steps_read.judge_finite = judge if on else None
            before = meter.read()
            for _ in range(number):
                trainer.step(batches)
                trainer._between_steps()
            passed = (now - then for now, then in zip(meter.read(), before, strict=True))
            return Costs(*summed(tuple(passed)))

        turn(True)
        found: dict[bool, list[Costs]] = {True: [], False: []}
        began = time.monotonic()
        for number in range(rounds):
            for on in (True, False) if number % 2 else (False, True):
                found[on].append(turn(on))
        wall = (time.monotonic() - began) / (2 * rounds * steps)

        (replicas,) = (c for c in every if isinstance(c, ReplicaCheck))
        (checkpoints,) = (c for c in every if isinstance(c, CheckpointManager))
        compares: list[list[float]] = []
        saves: list[list[float]] = []
        trainer.callbacks = without
        for _ in range(4):
            turn(False, 1)
            compares.append(summed(timed(lambda: replicas.check(trainer.iteration))))
            save_now = lambda: checkpoints.save(trainer.iteration, trainer.consumed_samples)  # noqa: E731
            saves.append(summed(timed(save_now)))
        if mesh.world.rank == 0:
            size = mesh.world.size
            row = {
                "on": found[True], "off": found[False], "wall": wall, "steps": steps,
                "compares": compares[1:], "saves": saves[1:], "size": size,
            }  # fmt: skip
            print("ROW", json.dumps(row), flush=True)
        if mesh.world.size > 1:
            dist.barrier()
        os._exit(0)


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


class Meter:
    """The CPU seconds of this process, and those of its checks."""

    def __init__(self) -> None:
        self._calls = 0.0

    def read(self) -> Costs:
        """Since the process began."""
        watching = looking = 0.0
        for thread in threading.enumerate():
            if thread.name in THREADS and thread.ident is not None:
                seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                watching += seconds * (thread.name != "own time")
                looking += seconds * (thread.name == "own time")
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                if (task / "comm").read_text().startswith(STORE):
                    watching += int((task / "schedstat").read_text().split()[0]) / 1e9
        return Costs(time.process_time(), watching, looking, self._calls)

    def follow(self, callback: Any) -> None:
        """Counts what a callback does in the main thread."""
        for name in ("before_step", "after_step", "between_steps"):
            setattr(callback, name, self.counted(getattr(callback, name)))
        paused = callback.paused

        @contextlib.contextmanager
        def counted(trainer: Any) -> Iterator[None]:
            context = paused(trainer)
            self.counted(context.__enter__)()
            try:
                yield
            finally:
                self.counted(context.__exit__)(None, None, None)

        callback.paused = counted

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self._calls += time.thread_time() - began

        return counted


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20, help="turns with and without the checks")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options.models[0], options.rounds, os.environ["SAVE"])
        return
    print(
        "| model | processes | wall ms, CPU ms a step | watchdog | own time | callbacks | together "
        "| with / without (quartiles) | comparison, CPU ms | in steps | of a save |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for model in options.models:
        for size in options.processes:
            print(line(model, launched(model, size, options.rounds)), flush=True)


def launched(model: str, size: int, rounds: int) -> dict[str, Any]:
    """Return the results of rank 0 of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as save:
        common = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "SAVE": save,
        }  # fmt: skip
        command = [sys.executable, __file__, "--models", model, "--rounds", str(rounds)]
        ranks = [
            subprocess.Popen(
                command,
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        lines = "".join(process.communicate()[0] for process in ranks).splitlines()
    (row,) = (json.loads(found[4:]) for found in lines if found.startswith("ROW "))
    return dict(row)


def line(model: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    on, off = ([Costs(*costs) for costs in row[name]] for name in ("on", "off"))
    whole = Costs(*map(sum, zip(*on, strict=True)))
    steps, size = row["steps"], row["size"]
    bare = whole.whole - whole.checks
    step = bare / len(on) / steps
    shares = [part / bare for part in (*whole[1:], whole.checks)]
    # The threads run in turns without checks, too.
    ratios = [a.whole / (b.whole - b.watching - b.looking) for a, b in zip(on, off, strict=True)]
    quotients = " ".join(f"{value:.4f}" for value in statistics.quantiles(ratios, n=4))
    compare = statistics.median(cpu for cpu, _ in row["compares"])
    save = statistics.median(cpu for cpu, _ in row["saves"])
    percent = " | ".join(f"{100 * share:.2f}%" for share in shares)
    return (
        f"| {model} | {size} | {1000 * row['wall']:.0f}, {1000 * step:.0f} | {percent} "
        f"| {quotients} | {1000 * compare:.1f} | {compare / step:.2f} | {compare / save:.2f} |"
    )


if __name__ == "__main__":
    main()
