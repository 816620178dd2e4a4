#!/usr/bin/env python
"""Validation losses over learning rates and widths, with muP and without.

    python benchmarks/width_transfer.py --data data/corpus_text_document --vocab-file vocab.json \
        --merge-file merges.txt --json runs/width.json --picture runs/width.png

Every width trains the same steps on the same batches at every rate of a grid of factors of two. The
best rate of a width is that with the least mean loss over the seeds; with muP it should be that of
the base, within a step of the grid, at up to 16 times its width. Heads have the same size at all
widths. AdamW's rates are those of --rates, Muon's those of --muon-rates.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.apps.pictures.plots import save_picture
from megatron.training.writers import read_metrics

HEAD = 16
MODEL = (
    "--num-layers 2 --seq-length 64 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 16 --global-batch-size 16 --lr-decay-style cosine "
    "--lr-warmup-iters 20 --weight-decay 0 --adam-beta2 0.95 --init-method-std 0.05 "
    "--split 95,5,0 --eval-iters 20 --log-interval 50 --peak-tflops 1 --num-workers 0 "
    "--tokenizer-type GPT2BPETokenizer"
).split()
OPTIMIZERS = {
    "adam": [],
    "muon": (
        "--optimizer muon --muon-nesterov --muon-momentum 0.95 --muon-scale-mode unit_rms_norm "
        "--muon-fp32-matmul-prec high"
    ).split(),
}


def main() -> int:
    options = parser().parse_args()
    rows: list[dict[str, Any]] = []
    rates = {"adam": options.rates, "muon": options.muon_rates}
    for optimizer, mup, width in product(options.optimizers, (True, False), options.widths):
        for rate, seed in product(rates[optimizer], options.seeds):
            row = {"optimizer": optimizer, "mup": mup, "width": width, "rate": rate, "seed": seed}
            rows.append(row | {"loss": trained(row, options)})
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(rows, indent=1))
    print(table(rows))
    if options.picture:
        draw(rows, Path(options.picture))
    return 0


def trained(row: dict[str, Any], options: argparse.Namespace) -> float:
    """Return the last validation loss of a training; infinite where it diverges."""
    hidden = options.base * row["width"]
    shape = ["--hidden-size", str(hidden), "--num-attention-heads", str(hidden // HEAD)]
    shape += ["--ffn-hidden-size", str(hidden * 8 // 3 // 8 * 8)]
    if row["mup"]:
        shape += ["--use-mup", "--mup-base-hidden-size", str(options.base)]
        shape += ["--mup-base-head-dim", str(HEAD)]
    with TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        data = ["--data-path", options.data, "--vocab-file", options.vocab_file]
        data += ["--merge-file", options.merge_file]
        data += ["--data-cache-path", options.cache or folder]
        length = ["--train-iters", str(options.steps), "--eval-interval", str(options.steps)]
        words = ["--lr", str(row["rate"]), "--seed", str(row["seed"])]
        argv = [*MODEL, *shape, *OPTIMIZERS[row["optimizer"]], *data, *length, *words]
        command = [sys.executable, "pretrain_gpt.py", *argv, "--metrics-file", str(metrics)]
        done = subprocess.run(command, capture_output=True, text=True)
        rows = read_metrics(str(metrics)) if metrics.exists() else []
        losses = [r.get("lm loss", r["loss"]) for r in rows if r["kind"] == "validation"]
        if done.returncode and "not finite" not in done.stdout + done.stderr:
            sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
        return losses[-1] if losses and math.isfinite(losses[-1]) else math.inf


Curves = dict[tuple[str, bool], dict[int, dict[float, float]]]


def means(rows: list[dict[str, Any]]) -> Curves:
    """Mean losses over the seeds, by optimizer and muP, width and rate."""
    losses: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        losses[row["optimizer"], row["mup"], row["width"], row["rate"]].append(row["loss"])
    curves: Curves = defaultdict(lambda: defaultdict(dict))
    for (optimizer, mup, width, rate), values in losses.items():
        curves[optimizer, mup][width][rate] = statistics.mean(values)
    return curves


def table(rows: list[dict[str, Any]]) -> str:
    """The best rate of every width, and its distance from the base's in steps of the grid."""
    lines = [
        "| optimizer | width | best rate | steps from the base's | loss | at the base's rate |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for (optimizer, mup), of_width in means(rows).items():
        first = min(of_width)
        base = min(of_width[first], key=of_width[first].__getitem__)
        for width, of_rate in of_width.items():
            best = min(of_rate, key=of_rate.__getitem__)
            name = f"{optimizer}{', muP' if mup else ''}"
            cells = (name, str(width), f"{best:.3g}", f"{math.log2(best / base):+.0f}",
                     f"{of_rate[best]:.3f}", f"{of_rate[base]:.3f}")  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Losses over the rate, a line for each width and a panel for each optimizer with and without
    muP."""
    from matplotlib.figure import Figure

    curves = means(rows)
    figure = Figure(figsize=(4.5 * len(curves), 4), dpi=150, layout="constrained")
    for axes, ((optimizer, mup), of_width) in zip(
        figure.subplots(1, len(curves), squeeze=False, sharey=True)[0], curves.items(), strict=True
    ):
        for width, of_rate in of_width.items():
            points = sorted((rate, loss) for rate, loss in of_rate.items() if math.isfinite(loss))
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{width} x")
        axes.set(title=f"{optimizer}, {'muP' if mup else 'without muP'}", xlabel="learning rate")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(title="width")
    figure.axes[0].set_ylabel("validation loss, nats per token")
    save_picture(figure, path)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--data", required=True, help="a prefix of .bin and .idx")
    result.add_argument("--vocab-file", required=True)
    result.add_argument("--merge-file", required=True)
    result.add_argument("--base", type=int, default=32, help="hidden size of the base")
    result.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    rates = [2.0**exponent for exponent in range(-10, -3)]
    result.add_argument("--rates", type=float, nargs="+", default=rates)
    result.add_argument("--muon-rates", type=float, nargs="+", default=[4 * r for r in rates])
    result.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    result.add_argument("--steps", type=int, default=400)
    result.add_argument("--seeds", type=int, nargs="+", default=[1])
    result.add_argument("--cache", help="folder that keeps sample indices between trainings")
    result.add_argument("--picture", help="draw the losses to this file")
    result.add_argument("--json", help="also write all losses to this file")
    return result


if __name__ == "__main__":
    sys.exit(main())
