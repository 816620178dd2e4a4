"""A rank that is slower than the others is named, with the reason where that can be seen."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from warm_runs import WarmRuns, alive, kill, wait

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 99 "
    "--mock-data --eval-iters 0 --peak-tflops 1 --train-iters 100000 --log-interval 50"
).split()

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def warm():
    with pytest.MonkeyPatch.context() as patch:
        path = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        runs = WarmRuns("slowed_run", "deepspeed")
        yield runs
    runs.stop()


@pytest.mark.parametrize(
    ("size", "rank", "fault", "flags", "reason"),
    [
        (2, 1, "step:0.2", (), ""),
        (2, 1, "lock:0.2", (), "is stopped or waits for a processor"),
        (2, 1, "data:0.1", ("--num-workers", "0"), "is reading its data"),
        (4, 2, "step:0.3", (), ""),
        (2, 1, "step:0.2", ("--tensor-model-parallel-size", "2"), ""),
        (2, 0, "stopped", (), ""),
    ],
)
def test_a_slow_rank_is_named(warm, tmp_path, size, rank, fault, flags, reason):
    output, metrics = tmp_path / "output", tmp_path / "metrics.jsonl"
    slowed = f"{rank}:{fault}" if ":" in fault else f"{size}:step:0"
    argv = [slowed, *FLAGS, *flags, "--metrics-file", metrics]
    ranks = warm.start(argv, size, output)

    def named() -> bool:
        if fault == "stopped" and metrics.exists():  # four fifths of the time
            for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[rank], number)
                time.sleep(seconds)
        return "times as long" in output.read_text()

    try:
        wait(ranks, lambda: output.exists() and named(), pause=0.1)
        wait(ranks, lambda: '"straggler"' in metrics.read_text(), pause=0.1)
        assert alive(ranks)
    finally:
        kill(ranks)
    lines = [line for line in output.read_text().splitlines() if "times as long" in line]
    assert f"rank {rank} (" in lines[0]
    assert reason in lines[0]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["rank"] for row in rows if row["kind"] == "straggler"] == [rank]
