#!/usr/bin/env python
"""Speed of saving and loading checkpoints, against the same bytes through plain files.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --layers 24 --hidden-size 1024 --folder /disk --json out.json

One process trains a GPT on made-up data. In each of several rounds it does, in another order every
time: the same bytes written to as many plain files and synced ("plain write"); the same with their
SHA-256 ("plain write + SHA-256"); a save; an asynchronous save, with training steps until it has
come to an end. Then, again in any order: those files read back ("plain read"); the checkpoint
verified and loaded. Medians and ranges are shown; files are in the page cache when they are read,
in both ways of reading.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.source import locate_checkpoint
from megatron.config import CheckpointConfig
from megatron.engine.environment import distributed
from megatron.engine.loading import load_checkpoint
from megatron.engine.saving import CheckpointWriter, SaveResult, own_slices
from megatron.features.async_save.writer import AsyncCheckpointWriter
from megatron.features.older_checkpoints.retention import apply_retention
from megatron.run.run import Run, parse_run
from megatron.training.build import build_trainer
from megatron.training.trainer import Trainer

BLOCK = 2**24


class Clock:
    """Wall and CPU seconds of each kind of work, by round."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def add(self, name: str, wall: float, cpu: float) -> None:
        self.wall.setdefault(name, []).append(wall)
        self.cpu.setdefault(name, []).append(cpu)

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.add(name, time.perf_counter() - wall, time.process_time() - cpu)


class Benchmark:
    """The trainer and what is measured of it."""

    def __init__(self, trainer: Trainer, run: Run, folder: Path) -> None:
        self.trainer, self.engine, self.folder = trainer, trainer.engine, folder
        self.clock = Clock()
        assert trainer.data.datasets.train is not None
        self.batches = trainer.data.batches(trainer.data.datasets.train, **trainer.reading())
        self.save = folder / "save"
        self.plain = folder / "plain"
        tokenizer = run.tokenizer.save_pretrained
        checkpoint = CheckpointConfig(save=str(self.save))
        config = dataclasses.replace(self.engine.config, checkpoint=checkpoint)
        with _config(self.engine, config):
            self.writers = {
                name: kind(self.engine, run.content, tokenizer)
                for name, kind in (("save", CheckpointWriter), ("async", AsyncCheckpointWriter))
            }
        self.steps = 0
        self.bytes = 0

    def step(self) -> float:
        """One training step; its seconds."""
        began = time.perf_counter()
        self.trainer.step(self.batches)
        self.steps += 1
        return time.perf_counter() - began

    def write_plainly(self, hashed: bool) -> None:
        """The tensors of a checkpoint, in files as it has them, while the older ones are there."""
        new = self.plain.with_name("new")
        new.mkdir()
        os.sync()
        with self.clock.measured("plain write + SHA-256" if hashed else "plain write"):
            for number, tensors in enumerate(self._tensors()):
                digest = hashlib.sha256()
                with open(new / str(number), "wb", buffering=0) as file:
                    for tensor in tensors:
                        content = tensor.numpy().data.cast("B")
                        for start in range(0, len(content), BLOCK):
                            block = content[start : start + BLOCK]
                            if hashed:
                                digest.update(block)
                            while block:
                                block = block[file.write(block) :]
                    os.fsync(file.fileno())
        shutil.rmtree(self.plain, ignore_errors=True)
        new.rename(self.plain)

    def _tensors(self) -> list[list[torch.Tensor]]:
        files = own_slices(self.engine, self.folder).tensors
        return [[t.cpu().contiguous() for t in tensors.values()] for tensors in files.values()]

    def save_in_foreground(self) -> None:
        os.sync()
        with self.clock.measured("save"):
            self.writers["save"].save(self.steps, {"consumed_samples": 0})
        (result,) = self.writers["save"].finished()
        self._take(result)

    def save_in_background(self) -> None:
        """Steps before, and steps during the save."""
        os.sync()
        before = [self.step() for _ in range(3)]
        writer = self.writers["async"]
        writer.save(self.steps, {"consumed_samples": 0})
        alongside, results = [], list[SaveResult]()
        while not results:
            alongside.append(self.step())
            results = writer.finished()
        self._take(results[0])
        self.clock.add("stall of an asynchronous save", results[0].stall_seconds, 0.0)
        self.clock.add("whole asynchronous save", results[0].seconds, 0.0)
        self.clock.add("step before it", statistics.mean(before), 0.0)
        self.clock.add("step next to it", statistics.mean(alongside), 0.0)

    def _take(self, result: SaveResult) -> None:
        if result.error is not None:
            raise result.error
        self.bytes = result.bytes
        # A run with --keep-last 1 does the same, but its time is not that of the save.
        apply_retention(self.save, result.iteration, keep_last=1, keep_every=None)

    def read_plainly(self) -> None:
        with self.clock.measured("plain read"):
            for path in sorted(self.plain.iterdir()):
                with open(path, "rb", buffering=0) as file:
                    buffer = bytearray(BLOCK)
                    while file.readinto(buffer):
                        pass

    def load(self) -> None:
        found = locate_checkpoint(self.save)
        assert found is not None
        with self.clock.measured("verify"):
            found.form.verify(found.folder)
        with self.clock.measured("verify and load"):
            load_checkpoint(self.engine, found)


@contextmanager
def _config(engine: Any, config: Any) -> Iterator[None]:
    before, engine.config = engine.config, config
    yield
    engine.config = before


def main() -> int:
    options = parser().parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(options, Path(folder))
    found["command"] = " ".join(["python", *sys.argv])
    found["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    flags = (
        f"--num-layers {options.layers} --hidden-size {options.hidden_size} "
        "--num-attention-heads 8 --seq-length 128 --micro-batch-size 1 --global-batch-size 1 "
        "--lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 8191 --mock-data --num-workers 0 "
        f"--eval-iters 0 --peak-tflops 1 --train-iters 1000000 --zero-stage {options.zero_stage}"
    ).split()
    run = parse_run(None, flags)
    with distributed(run.config.parallel) as mesh:
        trainer = build_trainer(run, mesh)
        benchmark = Benchmark(trainer, run, folder)
        benchmark.step()
        works: list[Callable[[], None]] = [
            lambda: benchmark.write_plainly(hashed=False),
            lambda: benchmark.write_plainly(hashed=True),
            benchmark.save_in_foreground,
            benchmark.save_in_background,
        ]
        reads = [benchmark.read_plainly, benchmark.load]
        for work in [*works, *reads]:  # buffers, files and caches are there from the second on
            work()
        benchmark.clock = Clock()
        chance = random.Random(1)
        for _ in range(options.rounds):
            for some in (works, reads):
                for work in chance.sample(some, len(some)):
                    work()
        for writer in benchmark.writers.values():
            writer.close()
        clock = benchmark.clock
        return {
            "bytes": benchmark.bytes,
            "rounds": options.rounds,
            "wall_seconds": clock.wall,
            "cpu_seconds": clock.cpu,
        }


def show(found: dict[str, Any]) -> None:
    size = found["bytes"]
    print(f"{size / 1e6:.0f} MB, {found['rounds']} rounds, {found['machine']}")
    print(f"{'':36}{'wall s':>9}{'range':>16}{'CPU s':>9}{'MB/s':>8}")
    for name, wall in found["wall_seconds"].items():
        middle, cpu = statistics.median(wall), statistics.median(found["cpu_seconds"][name])
        rate = "" if "step" in name or "stall" in name else f"{size / middle / 1e6:.0f}"
        spread = f"{min(wall):.3f}-{max(wall):.3f}"
        processor = f"{cpu:.3f}" if cpu else ""
        print(f"{name:36}{middle:9.3f}{spread:>16}{processor:>9}{rate:>8}")
    wall, cpu = found["wall_seconds"], found["cpu_seconds"]
    for name, plain in (("save", "plain write"), ("save", "plain write + SHA-256"),
                        ("verify and load", "plain read")):  # fmt: skip
        ratios = [
            statistics.median([a / b for a, b in zip(times[name], times[plain], strict=True)])
            for times in (wall, cpu)
        ]
        print(f"{name} / {plain}: {ratios[0]:.2f} in wall time, {ratios[1]:.2f} in CPU time")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--layers", type=int, default=12, help="blocks of the model")
    result.add_argument("--hidden-size", type=int, default=768, help="its width")
    result.add_argument("--zero-stage", type=int, default=1, help="ZeRO stage")
    result.add_argument("--rounds", type=int, default=7, help="rounds that are measured")
    result.add_argument("--folder", type=Path, help="file system to measure, by default /tmp's")
    result.add_argument("--json", type=Path, metavar="FILE", help="write every time that was taken")
    return result


if __name__ == "__main__":
    sys.exit(main())
