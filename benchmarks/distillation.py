#!/usr/bin/env python
"""Gain of a small model from a teacher, in the same number of steps.

    python benchmarks/distillation.py --text input.txt --work work

A teacher is trained on a text; then students, each with the same initial weights, batches and
learning rates by itself and with the teacher, whose term replaces a part of the cross
entropy. The last tenth of the text is held out.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "pretrain_gpt.py"
COMMON = (
    "--num-attention-heads 4 --seq-length 128 --swiglu --use-rotary-position-embeddings "
    "--normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 "
    "--micro-batch-size 2 --global-batch-size 2 --lr-decay-style cosine --lr-warmup-iters 20 "
    "--min-lr 1e-4 --eval-iters 60 --num-workers 0 --tokenizer-type ByteLevelTokenizer "
    "--log-interval 1000 --peak-tflops 1 --zero-stage 0 --split 90,10,0"
).split()
TEACHER = "--num-layers 4 --hidden-size 128 --lr 2e-3".split()
STUDENT = "--num-layers 2 --hidden-size 64 --lr 2e-3".split()
WAYS = {
    "alone": [],
    "teacher only": "--kd --kd-alpha-ce 0 --kd-beta-ce 1".split(),
    "half of each": "--kd --kd-alpha-ce 0.5 --kd-beta-ce 0.5".split(),
}
"""With the same sum of weights."""
DOCUMENT = 4096
"""Characters of a document that the text is cut into."""


def main() -> int:
    options = parser().parse_args()
    work = Path(options.work)
    data = documents(Path(options.text), work)
    steps = ["--train-iters", str(options.teacher_steps), "--save", str(work / "teacher")]
    if not (work / "teacher").exists():
        print(f"teacher: {held_out([*COMMON, *TEACHER, *data, *steps]):.4f}", flush=True)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(options.seeds):
        for way, flags in WAYS.items():
            named = ["--load-teacher", str(work / "teacher")] if flags else []
            run = ["--train-iters", str(options.steps), "--seed", str(1 + seed)]
            found[way].append(held_out([*COMMON, *STUDENT, *data, *run, *flags, *named]))
            print(f"seed {1 + seed}, {way}: {found[way][-1]:.4f}", flush=True)
    print(table(found))
    (work / "losses.json").write_text(json.dumps(found, indent=1))
    return 0


def documents(text: Path, work: Path) -> list[str]:
    """Writes the text as documents, JSON lines; returns the flags of the data."""
    work.mkdir(parents=True, exist_ok=True)
    whole, path = text.read_text(), work / "documents.jsonl"
    parts = (whole[at : at + DOCUMENT] for at in range(0, len(whole), DOCUMENT))
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    return ["--data-path", str(path)]


def held_out(argv: Sequence[str]) -> float:
    """Loss of a run on the held-out documents at its end."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *argv], text=True, capture_output=True, check=False
    )
    losses = re.findall(r"validation loss at .*?\| lm loss value: ([\d.E+-]+)", done.stdout)
    if done.returncode or not losses:
        raise SystemExit(f"{' '.join(argv)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(losses[-1])


def table(found: dict[str, list[float]]) -> str:
    """The mean held-out loss of each way, its range over the seeds, and the gain."""
    lines = ["| student | held-out loss | range | less than alone |", "|---|---|---|---|"]
    for way, losses in found.items():
        gains = [one - other for one, other in zip(found["alone"], losses, strict=True)]
        lines.append(
            f"| {way} | {statistics.mean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} "
            f"| {statistics.mean(gains):.4f} |"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--text", required=True, help="a text of about a million characters")
    options.add_argument("--work", required=True, help="folder for data and the teacher")
    options.add_argument("--teacher-steps", type=int, default=4800)
    options.add_argument("--steps", type=int, default=600)
    options.add_argument("--seeds", type=int, default=3)
    return options


if __name__ == "__main__":
    sys.exit(main())
