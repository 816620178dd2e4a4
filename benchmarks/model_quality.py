#!/usr/bin/env python
"""Validation losses of models that have equal weights (equal active ones with experts).

    python benchmarks/model_quality.py layers --data data/corpus_text_document \
        --vocab-file vocab.json --merge-file merges.txt --json runs/layers.json

``experts`` compares a dense model with eight experts, of which a token goes through two: with a
balancing loss, with a bias that balances them without a loss, and without either. ``layers``
compares attention with latent attention, and with Gated DeltaNet in three of four blocks, each also
with multi-token prediction, whose block is only there in training. ``optimizers`` compares AdamW
with others: the first seed trains each at several learning rates, the others at its best one.

Each of several seeds draws other weights and another order of the texts, the same order for all
models, and every model is evaluated on the same texts: the difference to the first model of the
same seed is the result, and its spread over the seeds says how far it can be believed. Weights are
drawn wide (0.08), since so short a training of so narrow a model spends most of its steps on
leaving the usual 0.02.
"""

import argparse
import json
import statistics
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.apps.pictures.plots import save_picture
from megatron.training.writers import read_metrics

MODEL = (
    "--hidden-size 64 --num-attention-heads 2 --seq-length 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--init-method-std 0.08 --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 16 "
    "--global-batch-size 16 --lr 4e-3 --lr-decay-style cosine --lr-warmup-iters 100 --min-lr 4e-4 "
    "--weight-decay 0.1 --adam-beta2 0.95 --split 95,5,0 --eval-iters 150 --eval-interval 250 "
    "--log-interval 50 --peak-tflops 1 --tokenizer-type GPT2BPETokenizer --num-workers 0"
).split()
EXPERTS = "--num-layers 2 --num-experts 8 --moe-router-topk 2 --ffn-hidden-size 128".split()
LATENT = (
    "--num-layers 4 --ffn-hidden-size 186 --multi-latent-attention --kv-lora-rank 32 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 32"
).split()
DELTA = (
    "--num-layers 4 --ffn-hidden-size 156 --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4 --linear-key-head-dim 32 --linear-value-head-dim 32 "
    "--linear-num-key-heads 2 --linear-num-value-heads 2"
).split()
ATTENTION = ["--num-layers", "4", "--ffn-hidden-size", "176"]
AHEAD = ["--mtp-num-layers", "1"]
MUON = (
    "--optimizer muon --muon-nesterov --muon-momentum 0.95 --muon-extra-scale-factor 0.2 "
    "--muon-coefficient-type polar_express"
)
RATES = {
    "AdamW": ("", (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)),
    "Muon": (MUON, (4e-3, 8e-3, 1.6e-2, 3.2e-2)),
    "Lion": ("--optimizer lion --lion-beta1 0.9 --lion-beta2 0.99 --weight-decay 0.5",
             (8e-4, 1.6e-3, 3.2e-3)),
    "SOAP": ("--optimizer soap", (8e-3, 1.6e-2, 3.2e-2)),
    "schedule-free": ("--optimizer schedule_free --lr-decay-style constant",
                      (1.6e-2, 3.2e-2, 6.4e-2)),
}  # fmt: skip
MODELS = {
    "optimizers": {
        f"{name} {rate:g}": [
            *ATTENTION,
            *flags.split(),
            "--lr",
            f"{rate}",
            "--min-lr",
            f"{rate / 10:.2g}",
        ]
        for name, (flags, rates) in RATES.items()
        for rate in rates
    },
    "experts": {
        "dense": ["--num-layers", "2", "--ffn-hidden-size", "256"],
        "8 experts, balancing loss": [*EXPERTS, "--moe-aux-loss-coeff", "0.01"],
        "8 experts, bias": [
            *EXPERTS,
            *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
        ],
        "8 experts, no balancing": EXPERTS,
    },
    "layers": {
        f"{name}{', MTP' if ahead else ''}": [*flags, *ahead]
        for ahead in ([], AHEAD)
        for name, flags in (
            ("attention", ATTENTION),
            ("latent attention", LATENT),
            ("3 of 4 DeltaNet", DELTA),
        )
    },
}


def main() -> int:
    options = parser().parse_args()
    rows = []
    names = [name for name in MODELS[options.models] if fnmatch(name, options.only)]
    for seed in options.seeds:
        for name in names:
            rows.append({"model": name, "seed": seed, **trained(name, seed, options)})
            print(f"{name}, seed {seed}: {rows[-1]['loss']:.4f}", flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1))
        if options.models == "optimizers" and seed == options.seeds[0]:
            names = best_rates(rows)
    rows = [row for row in rows if row["model"] in names]
    print(table(rows))
    if options.picture:
        draw(rows, Path(options.picture))
    return 0


def best_rates(rows: list[dict[str, Any]]) -> list[str]:
    """Names of the models whose learning rate has the least loss of their optimizer."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        optimizer, _, _ = row["model"].rpartition(" ")
        best[optimizer] = min(best.get(optimizer, row), row, key=lambda each: each["loss"])
    return [row["model"] for row in best.values()]


def trained(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Validation losses of a training and the last one; of experts also the loads of the busiest
    and the idlest one of any layer over the last steps, over the mean load."""
    with TemporaryDirectory() as folder:
        metrics = Path(options.metrics or folder, f"{name}-{seed}.jsonl".replace(" ", "-"))
        data = ["--data-path", options.data, "--vocab-file", options.vocab_file]
        data += ["--merge-file", options.merge_file, "--data-cache-path", folder]
        length = ["--train-iters", str(options.steps), "--seed", str(seed)]
        argv = [
            *MODEL,
            *MODELS[options.models][name],
            *data,
            *length,
            "--metrics-file",
            str(metrics),
        ]
        command = [sys.executable, "pretrain_gpt.py", *argv]
        if not metrics.exists():
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                metrics.unlink(missing_ok=True)
                sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        rows = read_metrics(str(metrics))
        curve = [
            (row["consumed_tokens"], row.get("lm loss", row["loss"]))
            for row in rows
            if row["kind"] == "validation"
        ]
        used = [row for row in rows if row["kind"] == "expert_loads"]
        shares = [
            share * sum(key.startswith("expert_") for key in row)
            for row in used
            if row["iteration"] == used[-1]["iteration"]
            for key, share in row.items()
            if key.startswith("expert_")
        ]
        loads = (max(shares), min(shares)) if shares else None
        return {"loss": curve[-1][1], "curve": curve, "loads": loads}


def table(rows: list[dict[str, Any]]) -> str:
    """Losses, their difference to the first model of the same seed, and loads: a line a model."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    first = {row["seed"]: row["loss"] for row in rows if row["model"] == names[0]}
    lines = [
        f"| model | losses | less than {names[0]} | mean | busiest | idlest |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        of_model = [row for row in rows if row["model"] == name]
        losses = " ".join(f"{row['loss']:.3f}" for row in of_model)
        less = [first[row["seed"]] - row["loss"] for row in of_model]
        shown = " ".join(f"{each:.3f}" for each in less)
        loads = [row["loads"] for row in of_model if row["loads"]]
        ends = [max(high for high, _ in loads), min(low for _, low in loads)] if loads else []
        cells = [name, losses, shown, f"{statistics.mean(less):.3f}", *(f"{e:.2f}" for e in ends)]
        lines.append(f"| {' | '.join(cells + [''] * (6 - len(cells)))} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The mean validation loss of each model over consumed tokens, and the range of its seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["model"] for row in rows):
        curves = [row["curve"] for row in rows if row["model"] == name]
        tokens = [point[0] / 1e6 for point in curves[0]]
        losses = list(zip(*([loss for _, loss in curve] for curve in curves), strict=True))
        (line,) = axes.plot(
            tokens,
            list(map(statistics.mean, losses)),
            marker="o",
            markersize=3.5,
            linestyle="--" if name.endswith("MTP") else "-",
            label=name,
        )
        low, high = list(map(min, losses)), list(map(max, losses))
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="million tokens", ylabel="validation loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("models", choices=MODELS)
    result.add_argument("--data", required=True, help="a prefix of .bin and .idx")
    result.add_argument("--vocab-file", required=True)
    result.add_argument("--merge-file", required=True)
    result.add_argument("--steps", type=int, default=1000)
    result.add_argument("--only", default="*", help="models whose names match this pattern")
    result.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    result.add_argument("--metrics", help="keep metrics here, and repeat no training that has them")
    result.add_argument("--picture", help="draw the losses of the seeds to this file")
    result.add_argument("--json", help="also write all losses to this file")
    return result


if __name__ == "__main__":
    sys.exit(main())
