#!/usr/bin/env python
"""Validation losses of a dense model and of models with experts that have as many active weights.

    python benchmarks/expert_quality.py --data data/corpus_text_document \
        --vocab-file vocab.json --merge-file merges.txt --json runs/experts.json

All models see the same tokens in the same order; each of several seeds draws other weights and
another order. Eight experts, of which a token goes through two, are trained with a balancing loss,
with a bias that balances them without a loss, and without either.
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
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 32 --global-batch-size 32 "
    "--lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 20 --min-lr 2e-4 --weight-decay 0.1 "
    "--split 98,2,0 --eval-iters 30 --eval-interval 100000 --log-interval 50 --peak-tflops 1 "
    "--tokenizer-type GPT2BPETokenizer --num-workers 0"
).split()
EXPERTS = "--num-experts 8 --moe-router-topk 2 --ffn-hidden-size 192".split()
MODELS = {
    "dense": ["--ffn-hidden-size", "384"],
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
        loss = trained(name, seed, options)
        print(f"{name}, seed {seed}: {loss:.4f}", flush=True)
        rows.append({"model": name, "seed": seed, "loss": loss})
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return 0


def trained(name: str, seed: int, options: argparse.Namespace) -> float:
    """Validation loss after a training."""
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
        last = [row for row in read_metrics(str(metrics)) if row["kind"] == "validation"][-1]
        return last.get("lm loss", last.get("loss"))


def table(rows: list[dict]) -> str:
    """Mean and spread over the seeds, a line for each model."""
    lines = ["| model | mean | least | most |", "|---|---|---|---|"]
    for name in MODELS:
        losses = [row["loss"] for row in rows if row["model"] == name]
        mean = statistics.mean(losses)
        lines.append(f"| {name} | {mean:.4f} | {min(losses):.4f} | {max(losses):.4f} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--data", required=True, help="a prefix of .bin and .idx")
    result.add_argument("--vocab-file", required=True)
    result.add_argument("--merge-file", required=True)
    result.add_argument("--steps", type=int, default=300)
    result.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    result.add_argument("--metrics", help="keep the metrics of all trainings in this folder")
    result.add_argument("--json", help="also write all losses to this file")
    return result


if __name__ == "__main__":
    sys.exit(main())
