"""Ordinary training with every check on, in which nothing may be reported.

``python tests/faults/soak.py --processes 1 2 4 --steps 20000`` trains a tiny model on the text of
the documentation, with warm-up, a batch size that grows, evaluations, saves in the background, a
resume and a job that is suspended for longer than ``--hang-seconds``; it prints what was reported
and ends with status 1 if that was anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from warm_runs import WarmRuns, alive, kill  # noqa: E402

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 3e-3 "
    "--lr-decay-style cosine --lr-warmup-iters 200 --global-batch-size 8 --split 98,2,0 "
    "--tokenizer-type ByteLevelTokenizer --peak-tflops 1 --eval-interval 1000 "
    "--eval-iters 2 --save-interval 2500 --keep-last 2 --async-save --log-interval 100 "
    "--hang-seconds 20 --check-replicas-interval 500"
).split()
SUSPENDED = 30.0
"""Seconds, more than --hang-seconds."""
ALARMS = re.compile(r"(?m)^.*(?:WARNING|[Ww]arning: |error: |takes .* times as long|spike).*$")


class Soaked(NamedTuple):
    """What a training reported."""

    processes: int
    steps: int
    seconds: float
    alarms: list[str]


def corpus(folder: Path) -> Path:
    """The documentation as an indexed file of bytes; its prefix."""
    lines = [json.dumps({"text": path.read_text()}) for path in sorted(ROOT.rglob("docs/**/*.md"))]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    subprocess.run(
        [
            sys.executable, "tools/preprocess_data.py", "--input", folder / "docs.jsonl",
            "--output-prefix", folder / "docs", "--tokenizer-type", "ByteLevelTokenizer",
            "--append-eod", "--workers", "1",
        ],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (found,) = folder.glob("docs*.idx")
    return found.with_suffix("")


def soak(
    warm: WarmRuns, folder: Path, data: Path, processes: int, steps: int, more: Sequence[str]
) -> Soaked:
    """Trains in two runs, and suspends the second one."""
    began, printed, alarms = time.monotonic(), "", []
    argv = [
        *FLAGS, *more, "--data-path", data, "--train-iters", steps, "--save", folder / "save",
        "--load", folder / "save", "--data-cache-path", folder / "cache",
        "--rampup-batch-size", "4", "4", 2 * steps, "--micro-batch-size", 4 // processes,
        "--metrics-file", folder / "metrics.jsonl",
    ]  # fmt: skip
    for part, end in enumerate((["--exit-interval", str(steps // 2)], [])):
        output = folder / f"output{part}"
        ranks = warm.start([*argv, *end], processes, output)
        suspended = part == 0
        while alive(ranks):
            time.sleep(0.5)
            if not suspended and "resumed from" in output.read_text():
                suspended = True
                time.sleep(10)
                _suspend(ranks)
        kill(ranks)
        texts = sorted(folder.glob(f"output{part}*"))
        printed = "\n".join(path.read_text(errors="replace") for path in texts)
        alarms += ALARMS.findall(printed)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    alarms += [str(row) for row in rows if row["kind"] in ("spike", "straggler", "rollback")]
    alarms += [f"{path.name} was written" for path in (folder / "save").glob("hang-*")]
    done = max(row["iteration"] for row in rows)
    if done != steps or f"iteration {steps:8d}/" not in printed:
        alarms.append(f"ended after {done} steps: {printed[-2000:]}")
    return Soaked(processes, done, time.monotonic() - began, alarms)


def _suspend(ranks: Sequence[int]) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank, number)
        time.sleep(SUSPENDED if number == signal.SIGSTOP else 0)


def main() -> None:
    """Prints a line for each number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=20_000)
    options, more = parser.parse_known_args()
    warm, failed = WarmRuns("pretrain_gpt", "deepspeed"), False
    with tempfile.TemporaryDirectory() as name:
        data = corpus(Path(name))
        for processes in options.processes:
            folder = Path(name) / str(processes)
            folder.mkdir()
            found = soak(warm, folder, data, processes, options.steps, more)
            print(
                f"{found.processes} processes, {found.steps} steps in {found.seconds:.0f} s: "
                f"{len(found.alarms)} alarms",
                *found.alarms[:20],
                sep="\n    ",
                flush=True,
            )
            failed = failed or bool(found.alarms)
    warm.stop()
    sys.exit(failed)


if __name__ == "__main__":
    main()
