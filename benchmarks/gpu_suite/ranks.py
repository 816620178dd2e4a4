"""Several ranks on one card, over gloo: their losses next to those of one rank.

    python benchmarks/gpu_suite/ranks.py FLAGS

NCCL refuses two ranks on a card, gloo copies through the host. So this says whether layouts compute
the right thing on GPUs, compiled too, and nothing about speed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

STEPS = 4
CLOSE = 1e-2
"""Largest relative difference of a loss in bf16."""
TRAINING = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 "
    "--seq-length 256 --attention-dropout 0 --hidden-dropout 0 --swiglu --normalization RMSNorm "
    "--use-rotary-position-embeddings --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 1023 --mock-data "
    f"--num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 1000 --train-iters {STEPS}"
).split()
_TENSOR = "--tensor-model-parallel-size 2"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one rank": (1, "--zero-stage 1"),
    "one rank, compiled": (1, "--zero-stage 1 --torch-compile"),
    "tp2": (2, f"--zero-stage 1 {_TENSOR}"),
    "tp2, compiled": (2, f"--zero-stage 1 {_TENSOR} --torch-compile"),
    "tp2-sp": (2, f"--zero-stage 1 {_TENSOR} --sequence-parallel"),
    "tp2-sp, compiled": (2, f"--zero-stage 1 {_TENSOR} --sequence-parallel --torch-compile"),
    **{f"dp2, ZeRO {stage}": (2, f"--zero-stage {stage}") for stage in (1, 2, 3)},
}
"""Ranks and flags; the first is what the others are compared with. Pipelines need NCCL: gloo cannot
send tensors of GPUs, and the trainer refuses it."""
TOGETHER = 4
"""Layouts at once: most of their time is the start of processes."""
Found = dict[str, Any]
Ranks = list[tuple[subprocess.Popen[bytes], BinaryIO]]
"""Processes, and what they print."""


def on_one_card(timeout: float, dtype: str = "--bf16") -> Found:
    """Run every layout: ``rows`` [layout, losses or what went wrong, largest relative difference],
    and ``failed``, the layouts that differ or fail."""
    waiting, running = list(LAYOUTS), dict[str, Ranks]()
    said: dict[str, list[float] | str] = {}
    deadline = time.monotonic() + timeout
    try:
        while waiting or running:
            while waiting and len(running) < TOGETHER:
                name = waiting.pop(0)
                running[name] = _start(name, dtype)
            done = [n for n, ranks in running.items() if _ended(ranks)]
            if not done and time.monotonic() > deadline:
                said |= dict.fromkeys([*running, *waiting], "not done in time")
                break
            for name in done:
                said[name] = _losses(running.pop(name))
            time.sleep(0.1)
    finally:
        for ranks in running.values():
            for rank, _ in ranks:
                rank.kill()
    return compared(said)


def compared(said: dict[str, list[float] | str]) -> Found:
    """Compare losses with those of the first layout; see :func:`on_one_card`."""
    first, rows, wrong = said.get(next(iter(LAYOUTS))), [], []
    for name in LAYOUTS:
        losses = said.get(name, "not run")
        worst = None
        if isinstance(losses, list) and isinstance(first, list) and len(losses) == len(first):
            apart = [abs(a - b) / (abs(b) or 1.0) for a, b in zip(losses, first, strict=True)]
            worst = next(filter(math.isnan, apart), max(apart))
        if worst is None or not worst <= CLOSE:  # NaN is not
            wrong.append(name)
        rows.append([name, losses, worst])
    return {"rows": rows, **({"failed": f"not as one rank: {'; '.join(wrong)}"} if wrong else {})}


def _start(name: str, dtype: str) -> Ranks:
    size, flags = LAYOUTS[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, *TRAINING, *dtype.split(), *flags.split()]
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
        ),
        **{"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }
    # A pipe that is not read would stop a rank that says much.
    outputs = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115  # closed when read
    processes = [
        subprocess.Popen(
            [*command, "--distributed-backend", "gloo"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    return list(zip(processes, outputs, strict=True))


def _ended(ranks: Ranks) -> bool:
    """True if all ranks have ended; after an error of one the others are ended."""
    if any(rank.poll() for rank, _ in ranks):
        for rank, _ in ranks:
            rank.kill()
    return all(rank.poll() is not None for rank, _ in ranks)


def _losses(ranks: Ranks) -> list[float] | str:
    """Losses of the rank that has them, or the last line of the one that failed."""
    texts = []
    for rank, output in ranks:
        rank.wait()
        output.seek(0)
        texts.append(output.read().decode(errors="replace").strip())
        output.close()
    for (rank, _), text in zip(ranks, texts, strict=True):
        if rank.returncode > 0:
            return (text.splitlines() or ["no output"])[-1][:300]
    for text in texts:
        last = (text.splitlines() or [""])[-1]
        if last.startswith("["):
            return json.loads(last)
    return "it printed no losses"


def main() -> None:
    """One rank: trains, and prints its losses as the last line."""
    # A rank has no card of its own.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    from megatron.apps.parity import runs

    record = runs.train(sys.argv[1:])
    print(f"\n{json.dumps(record.losses)}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
