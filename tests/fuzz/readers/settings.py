"""Files of settings and records of runs: DeepSpeed's JSON, metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz.fuzzer import ROOT, Fuzzer

from megatron.apps.pictures.run_curves import read_evaluations
from megatron.config import FLAG_CLASSES, FlagParser
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import complete
from megatron.run.run import run_of

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    "--max-position-embeddings 8 --lr 1 --train-iters 2 --mock-data --vocab-size 64"
).split()


def write_deepspeed(folder: Path) -> None:
    content = json.loads((ROOT / "deepspeed_configs" / "ds_zero1.json").read_text())
    content |= {"gradient_clipping": 1.0, "steps_per_print": 10, "wall_clock_breakdown": False}
    (folder / "ds.json").write_text(json.dumps(content, indent=1))


def read_deepspeed(folder: Path) -> None:
    path = str(folder / "ds.json")
    content = read_json(path)
    run = run_of(FlagParser(*FLAG_CLASSES).settings([*FLAGS, "--deepspeed_config", path]), 1)
    complete(content, run.config)


ROWS = (
    {"kind": "train", "iteration": 1, "consumed_tokens": 8, "loss": 2.5},
    {"kind": "validation", "iteration": 1, "consumed_tokens": 8, "loss": 2.5, "perplexity": 12.2},
    {"kind": "task wikitext", "iteration": 1, "consumed_tokens": 8, "bits_per_byte": 0.5},
    {"kind": "task lambada", "iteration": 1, "consumed_tokens": 8, "accuracy": None},
)


def write_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


FUZZERS = (
    Fuzzer("deepspeed-json", write_deepspeed, read_deepspeed),
    Fuzzer(
        "metrics",
        write_metrics,
        lambda folder: read_evaluations({"run": folder / "metrics.jsonl"}),
    ),
)
