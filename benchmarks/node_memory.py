#!/usr/bin/env python
"""Cost of checkpoints in the memory of the nodes, against asynchronous saves to the disk.

    python benchmarks/node_memory.py
    python benchmarks/node_memory.py --hidden-size 1024 --processes 4 --rounds 5

Each process is a node with a folder of its own in ``/dev/shm``. Runs with one and with two copies
of every part, and with ``--async-save`` to ``--folder``, follow each other in several rounds; all
save at every second step. Shown are medians of the stall of training and of the time until a save
is complete, and their range, for a checkpoint of so many megabytes.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {
    "memory, one copy": ["--non-persistent-save-interval", "2", "--replication-factor", "1"],
    "memory, two copies": ["--non-persistent-save-interval", "2", "--replication-factor", "2"],
    "disk, --async-save": ["--save-interval", "2", "--async-save", "--keep-last", "1"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of checkpoints on a disk")
    options = parser.parse_args()
    found: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in sorted(KINDS, reverse=number % 2 == 1):
            found[kind] += rows(options, KINDS[kind])
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors")
    for kind, several in found.items():
        size = several[0]["bytes"] / 1e6
        stall, whole = ([row[name] for row in several] for name in ("stall_seconds", "seconds"))
        print(
            f"{kind}: {size:.0f} MB, {len(several)} saves | stall {shown(stall)} ms, "
            f"{1000 * statistics.median(stall) / size:.2f} ms/MB | complete after {shown(whole)} ms"
        )


def shown(seconds: list[float]) -> str:
    """Median and range, in milliseconds."""
    low, middle, high = (1000 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def rows(options: argparse.Namespace, flags: list[str]) -> list[dict]:
    """Return the rows that a run records of its saves; the first of them pays for the memory of
    later ones."""
    in_memory = "--replication-factor" in flags
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as save,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        socket.socket() as probe,
    ):
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        processes = []
        for rank in range(options.processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            own = ["--non-persistent-local-ckpt-dir", f"{memory}/{rank}"] * in_memory
            command = [sys.executable, "pretrain_gpt.py", *model(options), *flags, *own]
            environment = os.environ | {name: str(value) for name, value in place.items()}
            processes.append(
                subprocess.Popen(
                    [*command, "--save", save], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
                )
            )
        assert all(process.wait() == 0 for process in processes)
        lines = (Path(save) / "metrics.jsonl").read_text().splitlines()
    kind = "memory_save" if in_memory else "save"
    return [row for row in map(json.loads, lines) if row["kind"] == kind][1:]


def model(options: argparse.Namespace) -> list[str]:
    """Flags of a short run."""
    return (
        f"--num-layers {options.layers} --hidden-size {options.hidden_size} "
        f"--num-attention-heads 8 --seq-length 128 --micro-batch-size 1 --lr 1e-4 "
        f"--global-batch-size {2 * options.processes} --tokenizer-type NullTokenizer "
        "--vocab-size 4096 --mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 "
        "--train-iters 12 --log-interval 12 --zero-stage 1"
    ).split()


if __name__ == "__main__":
    main()
