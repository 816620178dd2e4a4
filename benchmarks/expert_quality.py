#!/usr/bin/env python
"""Validation losses of a dense model and of models with experts that have equal active weights.

    python benchmarks/expert_quality.py --data data/corpus_text_document \
        --vocab-file vocab.json --merge-file merges.txt --json runs/experts.json

Eight experts, of which a token goes through two, are trained with a balancing loss, with a bias
that balances them without a loss, and without either. Each of several seeds draws other weights and
another order of the texts, the same order for all models, and every model is evaluated on the same
texts: the difference to the dense model of the same seed is the result, and its spread over the
seeds says how far it can be believed. Weights are drawn wide (0.08), since so short a training of
so narrow a model spends most of its steps on leaving the usual 0.02.
"""

import argparse
import json
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.training.writers import read_metrics

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--init-method-std 0.08 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 16 "
    "--global-batch-size 16 --lr 4e-3 --lr-decay-style cosine --lr-warmup-iters 20 --min-lr 4e-4 "
    "--weight-decay 0.1 --adam-beta2 0.95 --split 95,5,0 --eval-iters 150 --eval-interval 100000 "
    "--log-interval 50 --peak-tflops 1 --tokenizer-type GPT2BPETokenizer --num-workers 0"
).split()
EXPERTS = "--num-experts 8 --moe-router-topk 2 --ffn-hidden-size 128".split()
MODELS = {
    "dense": ["--ffn-hidden-size", "256"],
    "8 experts, balancing loss": [*EXPERTS, "--moe-aux-loss-coeff", "0.01"],
    "8 experts, bias": [
        *EXPERTS,
        *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
    ],
    "8 experts, no balancing": EXPERTS,
}


def main() -> int:
    options = parser().parse_args()
    rows = []
    for seed, name in product(options.seeds, MODELS):
        loss, loads = trained(name, seed, options)
        print(f"{name}, seed {seed}: {loss:.4f}", flush=True)
        rows.append({"model": name, "seed": seed, "loss": loss, "loads": loads})
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return 0


def trained(
    name: str, seed: int, options: argparse.Namespace
) -> tuple[float, tuple[float, float] | None]:
    """Validation loss after a training; of experts also the loads of the busiest and the idlest
    one of any layer over the last steps, over the mean load."""
    with TemporaryDirectory() as folder:
        metrics = Path(options.metrics or folder, f"{name}-{seed}.jsonl".replace(" ", "-"))
        data = ["--data-path", options.data, "--vocab-file", options.vocab_file]
        data += ["--merge-file", options.merge_file, "--data-cache-path", folder]
        length = ["--train-iters", str(options.steps), "--seed", str(seed)]
        argv = [*MODEL, *MODELS[name], *data, *length, "--metrics-file", str(metrics)]
        command = [sys.executable, "pretrain_gpt.py", *argv]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        rows = read_metrics(str(metrics))
        last = [row for row in rows if row["kind"] == "validation"][-1]
        used = [row for row in rows if row["kind"] == "expert_loads"]
        shares = [
            share * sum(key.startswith("expert_") for key in row)
            for row in used
            if row["iteration"] == used[-1]["iteration"]
            for key, share in row.items()
            if key.startswith("expert_")
        ]
        loads = (max(shares), min(shares)) if shares else None
        return last.get("lm loss", last["loss"]), loads


def table(rows: list[dict]) -> str:
    """Losses, their difference to the dense model of the same seed, and loads: a line a model."""
    dense = {row["seed"]: row["loss"] for row in rows if row["model"] == "dense"}
    lines = [
        "| model | losses | less than dense | mean | busiest | idlest |",
        "|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        of_model = [row for row in rows if row["model"] == name]
        losses = " ".join(f"{row['loss']:.3f}" for row in of_model)
        less = [dense[row["seed"]] - row["loss"] for row in of_model]
        shown = " ".join(f"{each:.3f}" for each in less)
        loads = [row["loads"] for row in of_model if row["loads"]]
        ends = [max(high for high, _ in loads), min(low for _, low in loads)] if loads else []
        cells = [name, losses, shown, f"{statistics.mean(less):.3f}", *(f"{e:.2f}" for e in ends)]
        lines.append(f"| {' | '.join(cells + [''] * (6 - len(cells)))} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--data", required=True, help="a prefix of .bin and .idx")
    result.add_argument("--vocab-file", required=True)
    result.add_argument("--merge-file", required=True)
    result.add_argument("--steps", type=int, default=1000)
    result.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    result.add_argument("--metrics", help="keep the metrics of all trainings in this folder")
    result.add_argument("--json", help="also write all losses to this file")
    return result


if __name__ == "__main__":
    sys.exit(main())
