"""A dashboard over written runs, as its command starts it, and runs to look at."""

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BATCH, LENGTH = 64, 256


@contextmanager
def dashboard(*runs: str | Path, flags: tuple[str, ...] = (), port: int = 0) -> Iterator[str]:
    """Its address; it ends with the context."""
    command = [sys.executable, str(ROOT / "tools" / "dashboard.py"), *map(str, runs), *flags]
    started = subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    try:
        line = started.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/\S*", line)
        assert found, line
        yield found[0]
    finally:
        started.terminate()
        started.wait(20)
        started.stdout.close()


def row(kind: str, step: int, **values: object) -> str:
    """A line of a file of metrics."""
    clocks = {"consumed_samples": BATCH * step, "consumed_tokens": BATCH * LENGTH * step}
    return json.dumps({"kind": kind, "iteration": step, **clocks, **values}) + "\n"


def train_row(step: int, seed: int = 0, **values: object) -> str:
    """A step of training whose numbers depend on its seed and step only."""
    noise = random.Random(f"{seed} {step}")
    seconds = 0.4 + 0.02 * noise.random()
    loss = 2.1 + 0.15 * seed + 7 * math.exp(-step / 300) + 0.06 * noise.gauss(0, 1)
    return row(
        "train",
        step,
        **{
            "loss": loss,
            "grad_norm": 0.6 + 0.1 * noise.random(),
            "learning_rate": 3e-4 * min(1.0, step / 100) * (1 - 0.0002 * step),
            "seconds_per_iteration": seconds,
            "tokens_per_second_per_device": BATCH * LENGTH / seconds / 8,
            "samples_per_second": BATCH / seconds,
            "mfu": 0.18 / seconds,
            "memory_allocated_bytes": 61.3e9,
            "own_seconds_slowest": 0.95 * seconds,
            "own_seconds_median": 0.9 * seconds,
            "own_seconds_fastest": 0.86 * seconds,
            "slowest_rank": noise.randrange(8),
            "global_batch_size": BATCH,
            "energy_joules": 8 * 400.0 * step,
            "cost": 8 * 2.5 * step * 0.41 / 3600,
            "co2_grams": 8 * 400.0 * step / 3.6e6 * 300,
            **values,
        },
    )


def write_run(
    path: Path, steps: int = 2000, seed: int = 0, spike: int | None = None, broken: int = 0
) -> Path:
    """A run with validation sets, a task, texts, saves, a resume; with ``spike`` one step of loss
    30, with ``broken`` lines that are no rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for step in range(1, steps + 1):
            if step == spike:
                file.write(train_row(step, seed, loss=30.0, grad_norm=9.5))
                values = {"loss": 30.0, "grad_norm": 9.5, "low": 2.0, "high": 3.0}
                file.write(row("spike", step, **values))
            else:
                file.write(train_row(step, seed))
            if step % 100 == 0:
                base = 2.2 + 0.15 * seed + 7 * math.exp(-step / 300)
                for name, more in (("web", 0.0), ("books", 0.3), ("code", -0.6)):
                    file.write(row(f"validation {name}", step, loss=base + more))
                file.write(row("task lambada", step, accuracy=0.6 - 0.5 * math.exp(-step / 500)))
            if step % 250 == 0:
                file.write(row("save", step, seconds=4.2, bytes=3.2e10, stall_seconds=0.3))
                text = {"prompt": "Once upon a time", "reference": "there was a king"}
                file.write(row("text", step, **text, answer=f"after {step} steps", ended=True))
            if step == steps // 2:
                file.write(row("resume", step))
        file.write('{"kind": "train", "iteration": 7, \n' * broken)
    return path


def write_record(metrics: Path, number: int = 1, end: str | None = None, **values: object) -> None:
    """Writes the record of a start next to the metrics: ``values`` are its configuration, by names
    such as ``training__seed``; ``end`` says why it has ended."""
    folder = metrics.parent / "run" / f"{number:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    times = {"began": "2026-11-27T08:00:00+00:00", "ended": end and "2026-11-27T09:41:00+00:00"}
    record = {"start": number, **times, "end": end, "folder": str(metrics.parent)}
    record |= {"command": ["pretrain_gpt.py", "--micro-batch-size", "8"], "world_size": 8}
    record |= {"hosts": [{"host": "node1", "ranks": [*range(8)], "devices": ["H100"] * 8}]}
    record |= {
        "data": [
            {"part": "train", "path": "/data/web_text_document", "weight": 0.7},
            {"part": "train", "path": "/data/books_text_document", "weight": 0.3},
        ]
    }
    (folder / "record.json").write_text(json.dumps(record))
    config: dict[str, dict[str, object]] = {}
    for name, value in {"logging__metrics_file": str(metrics), **values}.items():
        section, _, key = name.partition("__")
        config.setdefault(section, {})[key] = value
    (folder / "config.json").write_text(json.dumps(config))
