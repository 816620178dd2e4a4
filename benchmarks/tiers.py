#!/usr/bin/env python
"""Memory, files and waits of offloaded states, next to the planner's formulas.

    python benchmarks/tiers.py --folder /local --hidden-size 512 --layers 8
    sudo python benchmarks/tiers.py --slow 64 --memory 1100   # with a slow disk that is read

A process trains at ZeRO stage 3 in bfloat16 with its states in each of the places. Every 30 ms its
anonymous memory (``RssAnon`` of ``/proc/PID/status``) and the sizes of the files that it maps are
read. ``formula`` is what :mod:`megatron.features.tiers.rules` says of the files, and of the memory
that is free without what they have. With ``--slow`` the folder is a file system of its own whose
device lets so many MiB a second through (blkio), and with ``--memory`` the process, with what
the system caches for it, has so many MiB (control groups, version 1), so that the disk is read and
written in every step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.layouts import Layout
from megatron.features.tiers.rules import moved_bytes, weight_bytes

ROOT = Path(__file__).parents[1]
MIB = 2**20
PLACES = {
    "main memory": ("cpu", "cpu"),
    "optimizer in files": ("nvme", "cpu"),
    "both in files": ("nvme", "nvme"),
}
GROUPS = Path("/sys/fs/cgroup")


@dataclass
class Seen:
    """A run: bytes of anonymous memory by step, of its files at most, and seconds of steps."""

    anonymous: dict[int, float] = field(default_factory=dict)
    files: float = 0.0
    seconds: list[float] = field(default_factory=list)
    wait: float = 0.0
    weights: int = 0
    cpu: float = 0.0
    disk: tuple[int, int] = (0, 0)
    killed: bool = False

    @property
    def peak(self) -> float:
        return max(self.anonymous.values())

    @property
    def steady(self) -> float:
        """From step 3 on."""
        return max(size for step, size in self.anonymous.items() if step >= 3)


def run(options: argparse.Namespace, places: tuple[str, str], folder: Path, device: str) -> Seen:
    """Train a model with its optimizer and weights in two places, and watch the process."""
    sections = {
        key: {"device": place, **({"nvme_path": str(folder)} if place == "nvme" else {})}
        for key, place in zip(("offload_optimizer", "offload_param"), places, strict=True)
    }
    with tempfile.TemporaryDirectory() as own:
        path = Path(own, "ds.json")
        path.write_text(json.dumps({"zero_optimization": {"stage": 3, **sections}}))
        flags = (
            f"--num-layers {options.layers} --hidden-size {options.hidden_size} "
            "--num-attention-heads 8 --seq-length 64 --vocab-size 8191 --bf16 --lr 1e-4 "
            "--micro-batch-size 1 --global-batch-size 1 --tokenizer-type NullTokenizer "
            f"--mock-data --num-workers 0 --train-iters {options.steps} --eval-iters 0 "
            f"--log-interval 1 --peak-tflops 1 --deepspeed_config {path}"
        ).split()
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
        seen = Seen()
        before = _traffic(device)
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(_little_memory(options.memory))
            shell = f"echo $$ >{group}/cgroup.procs; exec " if group else "exec "
            process = subprocess.Popen(
                ["sh", "-c", f'{shell}"$@"', "sh", *command],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
            )  # fmt: skip
            _watch(process, folder, seen)
    read, written = (now - then for now, then in zip(_traffic(device), before, strict=True))
    seen.disk = read, written
    return seen


def _watch(process: subprocess.Popen[str], folder: Path, seen: Seen) -> None:
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if " iteration " in line:
                seen.seconds.append(_number(r"per iteration \(ms\): ([\d.]+)", line) / 1000)
            elif "parameters, " in line and not seen.weights:
                seen.weights = int(_number(r"([\d,]+) parameters", line))
            elif "a step waits for" in line:
                seen.wait = _number(r"waits for ([\d.,]+) s", line)

    reader = threading.Thread(target=read)
    reader.start()
    proc = Path("/proc", str(process.pid))
    while process.poll() is None:
        with contextlib.suppress(OSError, LookupError):  # it ends in the meantime
            size = 1024 * _number(r"RssAnon:\s+(\d+)", (proc / "status").read_text())
            step = len(seen.seconds) + 1
            seen.anonymous[step] = max(size, seen.anonymous.get(step, 0.0))
            maps = (proc / "maps").read_text().splitlines()
            ends = (line.split()[0].split("-") for line in maps if f"{folder}/" in line)
            seen.files = max(seen.files, sum(int(b, 16) - int(a, 16) for a, b in ends))
            ticks = (proc / "stat").read_text().rpartition(")")[2].split()
            seen.cpu = (int(ticks[11]) + int(ticks[12])) / 100
        time.sleep(0.03)
    reader.join()
    seen.killed = process.returncode == -signal.SIGKILL
    if process.returncode and not seen.killed:
        raise SystemExit("".join(lines[-30:]))


def _number(pattern: str, text: str) -> float:
    """Return the number of a pattern's group. Raises LookupError without one."""
    match = re.search(pattern, text)
    if match is None:
        raise LookupError(pattern)
    return float(match[1].replace(",", ""))


@contextlib.contextmanager
def _little_memory(mebibytes: int | None) -> Iterator[Path | None]:
    """A control group of memory, for one process."""
    if mebibytes is None:
        yield None
        return
    group = GROUPS / "memory" / f"tiers-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(mebibytes * MIB))
        yield group
    finally:
        time.sleep(0.5)
        group.rmdir()


@contextlib.contextmanager
def _disk(options: argparse.Namespace, own: Path) -> Iterator[tuple[Path, str]]:
    """The folder of the files and the name of its device: the one that is given, or a slow one."""
    if options.slow is None:
        yield Path(options.folder), ""
        return
    image, folder = own / "disk.ext4", own / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(2**30 * 4)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        find = ["findmnt", "-no", "SOURCE", folder]
        source = subprocess.run(find, check=True, capture_output=True, text=True).stdout
        device = Path(source.strip()).name
        number = Path("/sys/block", device, "dev").read_text().strip()
        for direction in ("read", "write"):
            limit = GROUPS / "blkio" / f"blkio.throttle.{direction}_bps_device"
            limit.write_text(f"{number} {options.slow * MIB}")
        yield folder, device
    finally:
        subprocess.run(["umount", folder], check=True)


def _traffic(device: str) -> tuple[int, int]:
    if not device:
        return 0, 0
    fields = Path("/sys/block", device, "stat").read_text().split()
    return 512 * int(fields[2]), 512 * int(fields[6])


def rows(found: dict[str, Seen]) -> list[str]:
    """The table."""
    layout = Layout(zero=3, precision="bf16")
    base = next(iter(found.values()))
    lines = [
        "| states | anonymous MiB from step 3 on | less than in main memory | formula | peak "
        "| files MiB | formula | s a step | at most, waiting | CPU s | MiB read, written |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, seen in found.items():
        if seen.killed:  # by the system, which has no more memory for it
            lines.append(f"| {name} | killed at {seen.peak / MIB:,.0f} {'| ' * 10}|")
            continue
        places, formula = PLACES[name], 0.0
        if places[0] == "nvme":
            formula += moved_bytes(layout, seen.weights)
        if places[1] == "nvme":
            formula += weight_bytes(layout, seen.weights)
        less = "" if base.killed else f"{(base.steady - seen.steady) / MIB:,.0f}"
        step = statistics.median(seen.seconds[2:])
        read, written = (size / MIB for size in seen.disk)
        lines.append(
            f"| {name} | {seen.steady / MIB:,.0f} | {less} | {formula / MIB:,.0f} "
            f"| {seen.peak / MIB:,.0f} | {seen.files / MIB:,.1f} | {formula / MIB:,.1f} "
            f"| {step:.2f} | {seen.wait:.1f} | {seen.cpu:.0f} | {read:,.0f}, {written:,.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the files")
    parser.add_argument("--slow", type=int, metavar="MIB", help="a second, of a disk of its own")
    parser.add_argument("--memory", type=int, metavar="MIB", help="of the process and its cache")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own, _disk(options, Path(own)) as (folder, device):
        found = {name: run(options, places, folder, device) for name, places in PLACES.items()}
    print(f"{max(seen.weights for seen in found.values()):,} weights\n")
    print("\n".join(rows(found)))


if __name__ == "__main__":
    main()
