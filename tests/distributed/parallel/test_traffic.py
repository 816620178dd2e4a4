"""What a step sends in each layout, and the graphs of its blocks, against formulas and a record.

One process is one rank, and answers for the others (one_rank.py). Formulas say what must be sent
however it is done; the record, what is. A change that sends more, or breaks a graph, fails here
without a GPU. MEGATRON_REWRITE_GOLDEN=1 rewrites the record.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from graph_counts import graphs, graphs_alone
from one_rank import Traffic, counted_groups, without_others
from training_jobs import TINY

from megatron.engine.environment import distributed
from megatron.run.run import parse_run
from megatron.training.build import build_trainer
from megatron.training.trainer import Callback, Step, Trainer

RECORD = Path(__file__).parents[2] / "golden" / "traffic.json"
LAYERS, HIDDEN, INNER, TOKENS, MICRO_BATCHES = 2, 32, 64, 16, 4
VOCABULARY = 128
"""99 tokens and the end of a document, up to a multiple of 128."""
BF16, STEPS = 2, 3
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--bf16 --num-layers {LAYERS} --ffn-hidden-size {INNER} --train-iters {STEPS} --eval-iters 0 "
    f"--make-vocab-size-divisible-by {VOCABULARY}"
).split()
_TENSOR = ("--tensor-model-parallel-size", "2")
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "dp2-zero1": (2, 2, ("--zero-stage", "1")),
    "dp2-zero2": (2, 2, ("--zero-stage", "2")),
    "dp2-zero3": (2, 2, ("--zero-stage", "3")),
    "tp2": (2, 1, _TENSOR),
    "tp2-sp": (2, 1, (*_TENSOR, "--sequence-parallel")),
    "pp2": (2, 1, ("--pipeline-model-parallel-size", "2")),
    "tp2-pp2": (4, 1, (*_TENSOR, "--pipeline-model-parallel-size", "2")),
    "cp2": (2, 1, ("--context-parallel-size", "2")),
    "ep2": (
        2, 2, ("--expert-model-parallel-size", "2", "--num-experts", "4"),
    ),
}  # fmt: skip
"""Ranks, copies of the model that see other samples, and flags."""
SAMPLE = {"dp2-zero1", "dp2-zero3", "tp2", "tp2-sp", "pp2"}
COMPILED = ("dp2-zero1", "tp2", "tp2-sp", "cp2")


class LastStep(Callback):
    """What the last step has sent."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic, self.sent = traffic, Counter[tuple[str, int]]()

    def before_step(self, trainer: Trainer) -> None:
        """See `Callback.before_step`."""
        self.traffic.clear()

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See `Callback.after_step`."""
        self.sent = Counter(self.traffic)


def sent(layout: str, *more: str) -> dict[str, int]:
    """Calls of each operation in the last step, by its name and bytes; for the pool."""
    ranks, copies, flags = LAYOUTS[layout]
    samples = ("--global-batch-size", str(MICRO_BATCHES * copies))
    with without_others(0, ranks), counted_groups() as traffic:
        run = parse_run(None, [*TINY, *LLAMA, *samples, *flags, *more])
        last = LastStep(traffic)
        with distributed(run.config.parallel) as mesh:
            build_trainer(run, mesh, [last]).fit()
    calls: Counter[str] = Counter()
    for (name, size), count in sorted(last.sent.items()):
        # How many rows go to each expert depends on values.
        calls[name if name == "all_to_all" and layout == "ep2" else f"{name} {size}"] += count
    return dict(calls)


def compiled(layout: str) -> tuple[dict[str, int], int, int]:
    """The same with compiled blocks, the number of graphs, and that of breaks; for the pool."""
    with graphs_alone():
        found = sent(layout, "--torch-compile")
        count, breaks = graphs()
    return found, count, breaks.total()


def recorded(name: str, found: object) -> object:
    """The record of a layout, which is what was found where it is rewritten."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if os.environ.get("MEGATRON_REWRITE_GOLDEN"):
        known[name] = found
        RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return known.get(name)


def by_operation(found: dict[str, int]) -> Counter[str]:
    """Bytes of each operation."""
    total: Counter[str] = Counter()
    for key, calls in found.items():
        name, _, size = key.partition(" ")
        total[name] += calls * int(size or 0)
    return total


def parameters() -> int:
    """Of the model: attention 4 H^2, MLP 3 H F, two norms; two tables and a norm."""
    block = 4 * HIDDEN**2 + 3 * HIDDEN * INNER + 2 * HIDDEN
    return LAYERS * block + 2 * VOCABULARY * HIDDEN + HIDDEN


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each in SAMPLE else pytest.mark.proof) for each in LAYOUTS],
)
def test_a_step_sends_what_is_recorded(pool, layout):
    (found,) = pool.run(1, sent, layout)
    assert found == recorded(layout, found)
    check(layout, found)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each == "tp2" else pytest.mark.proof) for each in COMPILED],
)
def test_compiled_blocks_send_the_same(pool, layout):
    """Graphs and breaks are recorded."""
    (found, count, breaks) = pool.run(1, compiled, layout, timeout=300.0)[0]
    result = {"graphs": count, "breaks": breaks}
    assert result == recorded(f"{layout}, compiled", result)
    assert found == recorded(layout, found)


def check(layout: str, found: dict[str, int]) -> None:
    """What must be sent, by arithmetic: activations [tokens, H] in bf16, weights, and gradients."""
    activations = TOKENS * HIDDEN * BF16
    if layout.startswith("dp2"):
        total = by_operation(found)
        weights = BF16 * parameters()
        reduced = total["all_reduce"] + total["reduce_scatter"] + total["reduce"]
        assert reduced >= weights and total["all_gather"] >= weights
        if layout == "dp2-zero1":  # once a step, however many micro batches there are
            assert reduced < 1.1 * weights and total["all_gather"] < 1.1 * weights
    # A block sums what attention and MLP add, and in the backward pass the gradients of their
    # inputs; the embedding sums once, and the head's input once.
    sums = MICRO_BATCHES * (4 * LAYERS + 2)
    if layout == "tp2":
        assert found[f"all_reduce {activations}"] == sums
    if layout == "tp2-sp":
        # Each sum scatters its slices; inputs of the two are gathered in both passes, and
        # gradients of their outputs.
        assert found[f"reduce_scatter {activations}"] == sums
        gathers = MICRO_BATCHES * (6 * LAYERS + 2)
        assert found[f"all_gather {activations}"] <= gathers
    if layout == "pp2":
        assert found[f"send {activations}"] == found[f"receive {activations}"] == MICRO_BATCHES
