"""The command that users start, in a process of its own: without data, files or a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_runs import ON_CPU, ON_GPU

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --micro-batch-size 4 --global-batch-size 8 "
    "--train-iters 20 --eval-iters 1 --eval-interval 10 --lr 1e-2 --lr-decay-style constant "
    "--log-interval 5 --peak-tflops 1 --bf16"
).split()


@pytest.mark.parametrize("more", [[], ["--zero-stage", "3"]], ids=["zero1", "zero3"])
def test_a_run_learns_saves_and_ends(tmp_path, more):
    paths = ["--save", str(tmp_path), "--save-interval", "20"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    if ON_CPU:
        environment["DS_ACCELERATOR"] = "cpu"
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS, *paths, *more],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert ("bf16 on cuda" if ON_GPU else "bf16 on cpu") in done.stdout
    assert ("it runs as ZeRO 1" in done.stdout) == bool(more)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3
    assert (tmp_path / "global_step20").is_dir()
