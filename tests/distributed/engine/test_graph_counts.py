"""With --torch-compile blocks of one shape share one graph, at every ZeRO stage."""

import pytest
from family_models import FAMILIES, MODELS, NO_DROPOUT, blocks
from graph_counts import graphs, graphs_alone
from training_jobs import TINY, train

FLAGS = [*TINY, "--num-layers", "4", "--train-iters", "2", "--torch-compile"]
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--num-query-groups 2 --attention-dropout 0 --hidden-dropout 0"
).split()
KINDS = {
    "gpt2": ([], 1),
    "llama": (LLAMA, 1),
    "recomputed": (["--recompute-granularity", "full", "--recompute-num-layers", "2"], 1),
    # The first block makes the mask that the others find made.
    "window": ([*LLAMA, "--sliding-window", "5"], 2),
    # Every second block has a window: two shapes, and for one of them the mask.
    "two-shapes": ([*LLAMA, "--sliding-window", "5", "--window-attn-skip-freq", "2"], 3),
}
"""Flags, and the graphs of four blocks."""
RANKS = {0: 1, 1: 1, 2: 2, 3: 2}
"""Data-parallel ranks by ZeRO stage: over one rank, 2 and 3 run as 1."""
SAMPLE: set[tuple[int, str]] = set()
"""The normal run counts them in test_whole_blocks.py, and without DeepSpeed in test_compile.py."""


def count(argv: list[str]) -> tuple[int, dict[str, int]]:
    """Graphs of a training, and what broke them; for the pool."""
    with graphs_alone():
        train(argv)
        found, breaks = graphs()
    return found, dict(breaks)


@pytest.mark.parametrize("form", ["bf16", pytest.param("fp32", marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        pytest.param(stage, kind, marks=() if (stage, kind) in SAMPLE else pytest.mark.proof)
        for stage in RANKS
        for kind in KINDS
    ],
)
def test_one_graph_for_each_shape_of_block(pool, stage, kind, form):
    flags, expected = KINDS[kind]
    argv = [*FLAGS, *flags, "--zero-stage", str(stage), *(["--bf16"] if form == "bf16" else [])]
    assert pool.run(RANKS[stage], count, argv) == [(expected, {})] * RANKS[stage]


@pytest.mark.proof
@pytest.mark.parametrize("stage", RANKS)
@pytest.mark.parametrize(
    ("family", "model", "expected"),
    [
        ("bert", "pre-norm", 1), ("bert", "post-norm", 1), ("bert", "recompute-full", 1),
        ("t5", "learned", 2), ("t5", "relative", 2), ("t5", "recompute-selective", 2),
        ("retro", "learned", 3), ("retro", "modern", 3), ("retro", "recompute-full", 3),
    ],
)  # fmt: skip
def test_one_graph_for_each_stack(pool, stage, family, model, expected):
    """Of padded samples: the mask is no graph of its own."""
    argv = [*FAMILIES[family], *MODELS[family][model], *NO_DROPOUT, "--num-layers", "3"]
    argv += ["--train-iters", "2", "--global-batch-size", str(2 * RANKS[stage]), "--torch-compile"]
    argv += ["--zero-stage", str(stage), "--bf16"]
    if family == "t5":
        argv += ["--decoder-num-layers", "3"]
    if family == "bert":  # a batch without padding needs no mask, which is a second graph
        argv += ["--short-seq-prob", "1"]
    if family == "retro":  # a block that reads nothing, one with the encoder, and one without
        argv += blocks(family, 3)
    assert pool.run(RANKS[stage], count, argv) == [(expected, {})] * RANKS[stage]
