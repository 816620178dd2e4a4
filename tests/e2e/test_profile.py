"""--profile and tools/profile_step.py as people start them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.apps.profiling.breakdown import break_down
from megatron.apps.profiling.trace import read_trace

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-2 "
    "--max-position-embeddings 32 --micro-batch-size 2 --tokenizer-type NullTokenizer "
    "--vocab-size 99 --mock-data --num-workers 0 --peak-tflops 1 --log-interval 1 --bf16 "
    "--zero-stage 1"
).split()


def run(script, *flags, processes=1):
    start = [sys.executable]
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        start += ["--master-port", port]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*start, script, *FLAGS, *map(str, flags)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def losses(save):
    rows = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.proof
def test_profile_writes_a_trace_and_leaves_training_alone(tmp_path):
    window = "--profile --profile-step-start 2 --profile-step-end 4".split()
    common = "--train-iters 5 --eval-iters 1 --eval-interval 3 --save-interval 3".split()
    profiled = run("pretrain_gpt.py", *common, *window, "--save", tmp_path / "a")
    assert profiled.returncode == 0, profiled.stderr
    plain = run("pretrain_gpt.py", *common, "--save", tmp_path / "b")
    assert plain.returncode == 0, plain.stderr
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 5
    (path,) = (tmp_path / "a" / "profile").iterdir()
    assert path.name == "rank0-step2-4.json.gz"
    trace = read_trace(path)
    found = break_down(trace)
    assert found.steps == 2 and trace.about["matmul_peak_flops"] > 0
    for cell in (
        ("attention", "forward"), ("attention", "backward"), ("matrix products", "forward"),
        ("matrix products", "backward"), ("norms", "forward"), ("norms", "backward"),
        ("loss", "forward"), ("embedding", "forward"), ("elementwise", "forward"),
        ("optimizer", "optimizer"), ("data", "data"),
    ):  # fmt: skip
        assert found.cells[cell] > 0, cell
    # Of each micro batch once forward and twice backward: QKV, projection, MLP, and the 128 rows of
    # the head, of which 100 are tokens.
    weights = 2 * 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32) + 128 * 32
    assert sum(p.amount for p in found.gemms) == 3 * 2 * weights * 2 * 32
    names = {event.name for event in trace.host[trace.main_thread]}
    assert {"megatron::evaluate", "megatron::save"} <= names, "iteration 3 does both"
    assert "matrix products" in profiled.stdout and str(path) in profiled.stdout


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_the_tool_breaks_down_two_processes(tmp_path, layout):
    done = run(
        "tools/profile_step.py", f"--{layout}-model-parallel-size", 2, "--global-batch-size", 4,
        "--profile-step-start", 1, "--profile-step-end", 2, "--profile-ranks", 1, 0,
        "--profile-dir", tmp_path, processes=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 step of rank 1: " in done.stdout and "rank 0: " not in done.stdout
    for rank in (0, 1):
        found = break_down(read_trace(tmp_path / f"rank{rank}-step1-2.json.gz"))
        assert found.rank == rank and found.of_category("communication") > 0
        assert found.of_phase("forward") > 0 and found.of_phase("backward") > 0
