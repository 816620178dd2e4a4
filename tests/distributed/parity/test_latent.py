"""Latent attention in every layout: loss and gradients against one process in float64, and training
at every ZeRO stage against plain torch, as test_gradients.py and test_training.py do it.

That the layer equals the one of `transformers` is tested in tests/features/latent.
"""

import pytest
from against_one_process import check_training, difference
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY

from megatron.apps.parity.layouts import flags_for, parse_layout

LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --swiglu --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
).split()
RANKED = ["--q-lora-rank", "24", "--qk-layernorm"]
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
YARN = "--rotary-scaling-factor 2.5 --mscale 0.8 --mscale-all-dim 0.7".split()
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss".split()
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32 "
    "--moe-layer-freq ([0]+[1]*7)"
).split()
MODELS = {
    "ranked": [*RANKED, *YARN],
    "direct": ["--v-head-dim", "12", "--softmax-type", "learnable"],
    "documents": [*RANKED, *DOCUMENTS, "--recompute-activations"],
    "biases": [*RANKED, "--add-attention-bias", "--recompute-granularity", "full"],
    "window": ["--sliding-window", "5", "--qk-layernorm", "--attention-backend", "eager"],
    "experts": [*RANKED, *EXPERTS],
}
SAMPLE = {("tp2-sp", "documents"), ("cp2-a2a", "direct")}
"""Cells of the normal run; `make proof` has the rest."""


def cells():
    for layout in (*LAYOUTS, *CONTEXT_LAYOUTS):
        for model in MODELS:
            if (layout, model) == ("cp4-a2a+p2p", "experts"):
                continue
            marks = () if (layout, model) in SAMPLE else (pytest.mark.proof,)
            yield pytest.param(layout, model, marks=marks)


@pytest.mark.parametrize(("layout", "model"), list(cells()))
def test_gradients_against_one_process(pool, layout, model):
    parsed = parse_layout(layout)
    batch = 2 * parsed.fewest_micro_batches * parsed.data
    argv = [*TINY, "--num-layers", "8", "--micro-batch-size", "2", *LATENT, *MODELS[model]]
    argv += ["--global-batch-size", str(batch), "--train-iters", "1", *NO_DROPOUT]
    assert difference(pool, parsed.processes, argv, flags_for(parsed)) is None


EP2 = "--expert-model-parallel-size 2".split()


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-dp2", "pp2-dp2", "cp2-dp2"])
def test_experts_over_ranks_against_one_process(pool, layout):
    parsed = parse_layout(layout)
    batch = 2 * parsed.fewest_micro_batches * parsed.data
    argv = [*TINY, "--num-layers", "8", "--micro-batch-size", "2", *LATENT, *RANKED, *EXPERTS]
    argv += ["--global-batch-size", str(batch), "--train-iters", "1", *NO_DROPOUT]
    assert difference(pool, parsed.processes, argv, [*flags_for(parsed), *EP2]) is None


STEPS = 8
TRAINED = [
    *(f"{layout}-zero{stage}" for layout in ("dp2", "tp2-sp-dp2", "cp2") for stage in range(4)),
    *("pp2-zero0", "pp2-zero1", "pp2-interleaved-zero1", "pp2-dualpipev-zero1"),
]


def training(dropout: str):
    more = {"all": [], "hidden": ["--attention-dropout", "0"], "none": NO_DROPOUT}[dropout]
    argv = [*TINY, "--num-layers", "4", *LATENT, *RANKED, *YARN, *more]
    batch = ["--global-batch-size", "8", "--train-iters", str(STEPS)]
    return [*argv, *batch, "--lr-decay-style", "cosine"]


@pytest.mark.proof
@pytest.mark.parametrize("layout", TRAINED)
def test_training_against_plain_torch(pool, layout):
    parsed = parse_layout(layout)
    check_training(pool, parsed.processes, training(parsed.dropout), flags_for(parsed))
