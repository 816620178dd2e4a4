#!/usr/bin/env python
"""Seconds from the command to the end of the first step, and from kill -9 to the end of the first
step of the run that is started again; where they go, by launcher, next to a peer.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 7 --processes 1 --json out.json
    python benchmarks/startup.py --compare ../before --no-peer    # two copies of the project

Every round starts every variant twice, in another order: with an empty cache of data indices and
no checkpoint; and again as soon as its processes were killed with SIGKILL behind a save. Phases
are timed from outside, by benchmarks/startup_stamps.py. Times of phases are means over the
processes (wall) and sums over them (CPU); shown are medians over the rounds, after a round that
warms up. The peer is `transformers` with stock DeepSpeed, benchmarks/startup_peer.py, of the same
shapes, on random tokens.
"""

import argparse
import json
import os
import platform
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

HERE = Path(__file__).resolve().parent
PHASES = (
    "launcher, interpreter",
    "import torch",
    "import deepspeed",
    "import transformers",
    "import torch's compiler",
    "import megatron",
    "configuration",
    "tokenizer",
    "data index",
    "torch.distributed",
    "model",
    "deepspeed.initialize",
    "checkpoint",
    "matmul peak",
    "other",
    "first step",
)
LIMIT = 300.0  # seconds that a start may take


@dataclass(frozen=True)
class Variant:
    """A way to start a training.

    Attributes:
        name: column of the table.
        launcher: python, torchrun or deepspeed.
        processes: that it starts.
        script: that they run.
    """

    name: str
    launcher: str
    processes: int
    script: Path

    def command(self, flags: Sequence[str], port: int) -> list[str]:
        """The whole command line."""
        program = [str(self.script), *flags]
        if self.launcher == "python":
            return [sys.executable, *program]
        launcher = str(Path(sys.executable).parent / self.launcher)
        count = "--nproc-per-node" if self.launcher == "torchrun" else "--num_gpus"
        return [launcher, count, str(self.processes), "--master_port", str(port), *program]


def main(argv: Sequence[str] | None = None) -> None:
    options = parser().parse_args(argv)
    found: dict[str, Any] = {
        "options": vars(options),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}",
        "variants": {},
    }
    with tempfile.TemporaryDirectory(prefix="startup-benchmark-") as folder:
        work = Path(folder)
        (work / "site").mkdir()
        (work / "site/sitecustomize.py").write_text((HERE / "startup_stamps.py").read_text())
        make_corpus(work / "corpus", options)
        chance = random.Random(1)
        variants = variants_of(options)
        for number in range(options.rounds + 1):
            for place in chance.sample(range(len(variants)), len(variants)):
                variant = variants[place]
                start, resume = measure(variant, work / f"{number}-{place}", work, options)
                if number:  # the first round warms up
                    times = found["variants"].setdefault(variant.name, {"start": [], "resume": []})
                    times["start"].append(start)
                    times["resume"].append(resume)
            print(f"round {number} of {options.rounds} done", file=sys.stderr, flush=True)
    print(report(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--processes", default="1,2", help="1 is plain python")
    result.add_argument("--launchers", default="torchrun,deepspeed", help="of several processes")
    result.add_argument("--layers", type=int, default=4)
    result.add_argument("--hidden-size", type=int, default=256)
    result.add_argument("--heads", type=int, default=4)
    result.add_argument("--seq-length", type=int, default=256)
    result.add_argument("--micro-batch-size", type=int, default=2)
    result.add_argument("--documents", type=int, default=5_000)
    result.add_argument("--vocab-file", help="GPT-2's (default: no tokenizer, 50,257 ids)")
    result.add_argument("--merge-file", help="GPT-2's")
    result.add_argument("--flags", default="", help="more flags of pretrain_gpt.py")
    result.add_argument("--no-peer", action="store_true", help="this project alone")
    result.add_argument("--compare", help="another copy of this project, measured next to it")
    result.add_argument("--json", help="file for the numbers")
    return result


def variants_of(options: argparse.Namespace) -> list[Variant]:
    scripts = {"": HERE.parent / "pretrain_gpt.py"}
    if options.compare:
        scripts[f" of {options.compare}"] = Path(options.compare).resolve() / "pretrain_gpt.py"
    if not options.no_peer:
        scripts[" peer"] = HERE / "startup_peer.py"
    result = []
    for count in map(int, options.processes.split(",")):
        for launcher in ["python"] if count == 1 else options.launchers.split(","):
            for suffix, script in scripts.items():
                words = launcher if count == 1 else f"{launcher} {count}"
                result.append(Variant(words + suffix, launcher, count, script))
    return result


def make_corpus(prefix: Path, options: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    lengths = np.maximum(rng.lognormal(6, 1, options.documents), 1).astype(np.int64)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        ids = rng.integers(0, 50_257, int(lengths.sum())).astype(np.uint16)
        writer.add_documents(ids, lengths, np.ones(len(lengths), np.int64))


def flags_of(
    variant: Variant, folder: Path, work: Path, options: argparse.Namespace
) -> Sequence[str]:
    files = ""
    if options.vocab_file:
        files = f"--vocab-file {options.vocab_file} --merge-file {options.merge_file}"
    shared = (
        f"--hidden-size {options.hidden_size} --seq-length {options.seq_length} "
        f"--micro-batch-size {options.micro_batch_size} {files} "
    )
    if variant.script.name == "startup_peer.py":
        shared += f"--layers {options.layers} --heads {options.heads} --checkpoints {folder}"
        return shared.split()
    kind = "GPT2BPETokenizer" if files else "NullTokenizer --vocab-size 50256"
    shared += (
        f"--num-layers {options.layers} --num-attention-heads {options.heads} --bf16 "
        f"--zero-stage 1 --global-batch-size {options.micro_batch_size * variant.processes} "
        f"--lr 1e-4 --tokenizer-type {kind} --data-path {work / 'corpus'} "
        f"--data-cache-path {folder / 'cache'} --split 98,2,0 "
        f"--train-iters 100000 --eval-iters 0 --save {folder} --load {folder} "
        f"--save-interval 2 --log-interval 1 {options.flags}"
    )
    return shared.split()


def measure(
    variant: Variant, folder: Path, work: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Times of a start, and of the one after the kill."""
    folder.mkdir()
    command = variant.command(flags_of(variant, folder, work, options), _free_port())
    start, killed = launch(variant, command, time.time(), folder / "start", work)
    assert (folder / "latest").exists(), "the save at step 2 comes before step 3"
    resume, _ = launch(variant, command, killed, folder / "resume", work)
    return start, resume


def launch(
    variant: Variant, command: Sequence[str], began: float, files: Path, work: Path
) -> tuple[dict[str, Any], float]:
    """Runs a command to the end of its third step and kills it.

    Returns:
        Its times, as :func:`times_of` gives them, and the time of the kill.

    Raises:
        RuntimeError: it ended by itself, or took longer than ``LIMIT``.
    """
    stamps, log = files.with_suffix(".jsonl"), files.with_suffix(".log")
    environment = {
        "OMP_NUM_THREADS": "1",
        **({} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}),
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(work / "site"),
        # Compiled files as users have them, without writing next to the sources.
        "PYTHONPYCACHEPREFIX": str(work / "compiled"),
        "STARTUP_STAMPS": str(stamps),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    tree = [psutil.Process(process.pid)]
    try:
        while True:
            lines = stamps.read_text().splitlines(keepends=True) if stamps.exists() else []
            found = [json.loads(line) for line in lines if line.endswith("\n")]
            steps = [stamp["pid"] for stamp in found if "step" in stamp]
            if sum(steps.count(pid) >= 3 for pid in set(steps)) == variant.processes:
                break
            if process.poll() is not None or time.time() > began + LIMIT:
                raise RuntimeError(f"{shlex.join(command)}\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        tree += tree[0].children(recursive=True)
        launchers = {stamp["pid"] for stamp in found} - set(steps)
        seconds = [
            sum(p.cpu_times()) for p in tree if p.pid in launchers | {process.pid} - {*steps}
        ]
        return times_of(found, began, sum(seconds)), _kill(tree)
    finally:
        _kill(tree)
        process.wait()


def _kill(tree: list[psutil.Process]) -> float:
    now = time.time()
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return now


def times_of(stamps: list[dict[str, Any]], began: float, launcher: float) -> dict[str, Any]:
    """Times of one start.

    Args:
        stamps: lines of benchmarks/startup_stamps.py.
        began: when the command was given, seconds since the epoch.
        launcher: CPU seconds of the launcher's own processes.

    Returns:
        ``phases``: (wall, CPU) seconds of each phase; ``total``: of all up to the first step's
        end; ``later``: of a later step.
    """
    workers = {}
    for stamp in stamps:
        if "step" in stamp:
            workers.setdefault(stamp["pid"], []).append(stamp)
    phases = {name: [0.0, 0.0] for name in PHASES}
    phases["launcher, interpreter"][1] = launcher
    ends, later = [], []
    for stamp in stamps:
        if "start" not in stamp or stamp["pid"] not in workers:
            continue
        first, *others = workers[stamp["pid"]]
        spent = first["phases"]
        steps = spent.pop("step")
        ends.append(first["at"])
        later.append([statistics.median(s["step"][i] for s in others) for i in (0, 1)])
        parts = {
            **spent,
            "launcher, interpreter": [stamp["start"][0] - began, stamp["start"][1]],
            "first step": steps,
        }
        measured = [sum(part[i] for part in parts.values()) for i in (0, 1)]
        parts["other"] = [first["at"][0] - began - measured[0], first["at"][1] - measured[1]]
        for name, (wall, cpu) in parts.items():
            phases[name][0] += wall / len(workers)
            phases[name][1] += cpu
    return {
        "phases": phases,
        "total": [max(wall for wall, _ in ends) - began, launcher + sum(cpu for _, cpu in ends)],
        "later": [statistics.mean(s[0] for s in later), sum(s[1] for s in later)],
    }


def report(found: dict[str, Any]) -> str:
    """Tables of seconds, wall and CPU."""
    options, variants = found["options"], found["variants"]
    lines = [
        found["machine"],
        f"{options['layers']} layers of width {options['hidden_size']}, "
        f"{options['rounds']} rounds; seconds, wall / CPU",
    ]
    for kind, title in (
        ("start", "command to first step's end"),
        ("resume", "kill -9 to resumed run's first step's end"),
    ):
        lines += ["", f"| {title} | {' | '.join(variants)} |", "|---" * (len(variants) + 1) + "|"]
        rows = {name: ("phases", name) for name in PHASES}
        rows |= {"**total**": ("total",), "a later step": ("later",)}
        for row, keys in rows.items():
            cells = [_median(times[kind], keys) for times in variants.values()]
            if any(max(cell) >= 0.005 for cell in cells):
                words = [f"{wall:.2f} / {cpu:.2f}" for wall, cpu in cells]
                lines.append(f"| {row} | {' | '.join(words)} |")
    return "\n".join(lines)


def _median(times: list[dict[str, Any]], keys: Sequence[str]) -> tuple[float, float]:
    values = []
    for one in times:
        for key in keys:
            one = one[key]
        values.append(one)
    wall, cpu = (statistics.median(value[i] for value in values) for i in (0, 1))
    return wall, cpu


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
