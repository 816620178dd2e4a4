#!/usr/bin/env python
"""Losses of a small GPT with the optimizer's states in each format, on real text.

    python benchmarks/optimizer_states.py --text input.txt
    python benchmarks/optimizer_states.py --text input.txt --steps 1000 --json out.json
    python benchmarks/optimizer_states.py --text input.txt --seeds 1 --formats 'bf16*'

The tokens are the bytes of the text, each seen once at most, so that losses are of unseen text.
Formats are those of --use-precision-aware-optimizer, float32, and the same formats rounded to
nearest instead of stochastically, which no flag does. All runs have the same initial weights and
batches, but those with float32 states and other seeds: the spread of their losses is the noise to
compare with.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.engine.environment import distributed
from megatron.engine.update.adam import Decoded
from megatron.features.low_bit_states import stored_states
from megatron.features.low_bit_states.stored_states import StoredStates
from megatron.run.run import parse_run

MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --init-method-std "
    "0.05 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 12 --tokenizer-type "
    "NullTokenizer --vocab-size 255 --bf16 --zero-stage 1 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.07 --weight-decay 0.1 --split 100,0,0 "
    "--eval-iters 0 --num-workers 0 --log-interval 100000 --peak-tflops 1"
).split()
SWITCH = "--use-precision-aware-optimizer"
MOMENTS_16 = [SWITCH, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
MOMENTS_8 = [SWITCH, "--exp-avg-dtype", "int8", "--exp-avg-sq-dtype", "int8"]
FORMATS = {
    "float32 states": [],
    "A: fp32 main weights, bf16 moments": MOMENTS_16,
    "B: bf16 weights, bf16 moments": [*MOMENTS_16, "--main-params-dtype", "bf16"],
    "C: fp32 main weights, int8 moments": MOMENTS_8,
    "bf16 weights, int8 moments": [*MOMENTS_8, "--main-params-dtype", "bf16"],
}


class Nearest(StoredStates):
    """The same formats rounded to nearest; ``kinds`` are the states that are."""

    kinds: tuple[str, ...] = Decoded._fields

    def bits(self, elements: Tensor, step: Tensor) -> Decoded:
        nothing = dict.fromkeys(self.kinds)
        return super().bits(elements, step)._replace(**nothing)  # type: ignore[arg-type]


class NearestFirst(Nearest):
    kinds = ("exp_avg",)


class NearestSecond(Nearest):
    kinds = ("exp_avg_sq",)


NEAREST = {
    "A, exp_avg to nearest": (MOMENTS_16, NearestFirst),
    "A, exp_avg_sq to nearest": (MOMENTS_16, NearestSecond),
    "B, all to nearest": (FORMATS["B: bf16 weights, bf16 moments"], Nearest),
    "C, all to nearest": (MOMENTS_8, Nearest),
}


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(options.text), Path(folder) / "text")
        flags = [*MODEL, "--data-path", str(data), "--train-iters", str(options.steps)]
        rows = {}
        for seed in range(options.seeds):
            found = train([*flags, "--seed", str(1234 + seed)])
            rows["float32 states" + f", seed {seed}" * (seed > 0)] = found
        stored = {name: (added, StoredStates) for name, added in FORMATS.items()} | NEAREST
        for name, (added, form) in stored.items():
            if added and any(fnmatch(name, pattern) for pattern in options.formats):
                with mock.patch.object(stored_states, "StoredStates", form):
                    rows[name] = train([*flags, *added])
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    return 0


def write_data(text: Path, prefix: Path) -> Path:
    """Documents of 4096 bytes."""
    content = np.frombuffer(text.read_bytes(), dtype=np.uint8)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for start in range(0, len(content), 4096):
            writer.add_document([content[start : start + 4096]])
    return prefix


def train(argv: Sequence[str]) -> list[float]:
    """Losses of all steps."""
    run, record = parse_run(None, argv), RunRecord()
    with distributed(run.config.parallel) as mesh:
        watched_trainer(run, mesh, record.add).fit()
    return record.losses


def table(rows: dict[str, list[float]]) -> str:
    reference = rows["float32 states"]
    count = len(reference)
    places = [count // 3, 2 * count // 3, count]
    head = [f"mean of steps {max(1, end - 49)}-{end}" for end in places]
    lines = [f"| states | {' | '.join(head)} | less float32 states |"]
    lines.append("|---" * (len(head) + 2) + "|")
    for name, losses in rows.items():
        means = [statistics.mean(losses[max(0, end - 50) : end]) for end in places]
        more = means[-1] - statistics.mean(reference[-50:])
        shown = [f"{value:.4f}" for value in means]
        lines.append(f"| {name} | {' | '.join(shown)} | {more:+.4f} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--text", required=True, help="a text file")
    result.add_argument("--steps", type=int, default=300)
    result.add_argument("--seeds", type=int, default=3, help="runs with float32 states")
    result.add_argument(
        "--formats", nargs="+", default=["*"], metavar="PATTERN", help="rows next to float32 states"
    )
    result.add_argument("--json", help="also write all losses to this file")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
