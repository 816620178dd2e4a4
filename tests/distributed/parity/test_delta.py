"""Gated DeltaNet in every layout: loss and gradients against one process in float64, and training
at every ZeRO stage against plain torch, as test_gradients.py and test_training.py do it.

That the layer equals the one of `transformers` is tested in tests/features/recurrent.
"""

import pytest
from against_one_process import check_training, difference
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY

from megatron.apps.parity.layouts import flags_for, parse_layout

DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8 "
    "--linear-value-head-dim 6 --swiglu --use-rotary-position-embeddings --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 4"
).split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss".split()
NEXT = (
    "--apply-layernorm-1p --qk-layernorm --attention-output-gate --rotary-percent 0.5 "
    "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32 "
    "--moe-shared-expert-gate --moe-ffn-hidden-size 24"
).split()
MODELS = {
    "plain": ["--linear-num-key-heads", "8"],
    "documents": [*DOCUMENTS, "--recompute-activations"],
    "chunks": ["--seq-length", "160", *DOCUMENTS, "--linear-conv-kernel-dim", "2"],
    "recompute": ["--recompute-granularity", "full", "--apply-layernorm-1p"],
    "next": NEXT,
}
SAMPLE = {("tp2-sp", "documents"), ("cp2-tp2", "documents")}
"""Cells of the normal run; `make proof` has the rest."""


def cells():
    for layout in (*LAYOUTS, *CONTEXT_LAYOUTS):
        for model in MODELS:
            if (layout, model) == ("cp4-a2a+p2p", "next"):
                continue
            marks = () if (layout, model) in SAMPLE else (pytest.mark.proof,)
            yield pytest.param(layout, model, marks=marks)


def compared(pool, layout, model, *more):
    parsed = parse_layout(layout)
    batch = 2 * parsed.fewest_micro_batches * parsed.data
    argv = [*TINY, "--num-layers", "8", "--micro-batch-size", "2", *DELTA, *MODELS[model]]
    argv += ["--global-batch-size", str(batch), "--train-iters", "1", *NO_DROPOUT]
    return difference(pool, parsed.processes, argv, [*flags_for(parsed), *more])


@pytest.mark.parametrize(("layout", "model"), list(cells()))
def test_gradients_against_one_process(pool, layout, model):
    assert compared(pool, layout, model) is None


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-dp2", "pp2-dp2", "cp2-dp2"])
def test_experts_over_ranks_against_one_process(pool, layout):
    assert compared(pool, layout, "next", "--expert-model-parallel-size", "2") is None


STEPS = 8
TRAINED = [
    *(f"{layout}-zero{stage}" for layout in ("dp2", "tp2-sp-dp2", "cp2") for stage in range(4)),
    *("pp2-zero0", "pp2-zero1", "pp2-interleaved-zero1", "pp2-dualpipev-zero1"),
]


def training(dropout: str):
    more = {"all": [], "hidden": ["--attention-dropout", "0"], "none": NO_DROPOUT}[dropout]
    argv = [*TINY, "--num-layers", "4", *DELTA, *more]
    batch = ["--global-batch-size", "8", "--train-iters", str(STEPS)]
    return [*argv, *batch, "--lr-decay-style", "cosine"]


@pytest.mark.proof
@pytest.mark.parametrize("layout", TRAINED)
def test_training_against_plain_torch(pool, layout):
    parsed = parse_layout(layout)
    check_training(pool, parsed.processes, training(parsed.dropout), flags_for(parsed))
