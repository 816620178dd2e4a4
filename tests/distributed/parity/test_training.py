"""Every layout at every ZeRO stage trains as one process does, through the whole engine in float32.

The reference is plain torch: no DeepSpeed, torch's AdamW, a loop. Loss and gradient norm must agree
to 1e-6 at the first step; after that rounding grows, and the allowed drift is 4 x what it does to
one process (docs/guides/parity.md).
"""

import pytest
from against_one_process import check_training
from training_jobs import LAYOUTS, TINY

from megatron.apps.parity.layouts import flags_for, parse_layout

FLAGS = [*TINY, "--global-batch-size", "8", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3"]
MODELS = {
    "gpt2": [],
    "llama": (
        "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
        "--untie-embeddings-and-output-weights --num-query-groups 2"
    ).split(),
    "gemma": (
        "--position-embedding-type rope --normalization RMSNorm --apply-layernorm-1p --post-norm "
        "--scale-embeddings --glu-activation geglu --disable-bias-linear --num-query-groups 1 "
        "--qk-layernorm --sliding-window 5 --window-attn-skip-freq 2 --attn-logit-softcapping 5"
    ).split(),
}
SAMPLE = ["pp2-dp2-zero2-gpt2"]
"""What the normal run has. Every layout is in the normal run of test_gradients.py, and pipelines
train in that of test_families.py."""
DROPOUT = {
    "all": [],
    "hidden": ["--attention-dropout", "0"],
    "none": ["--attention-dropout", "0", "--hidden-dropout", "0"],
}
"""The dropout that a layout draws as one process does (megatron/config/layouts.py) is on."""


def check(pool, layout: str, model: str, steps: int):
    parsed = parse_layout(layout)
    layers = max(2, parsed.pipeline * parsed.chunks)
    argv = [*FLAGS, "--num-layers", str(layers), *MODELS[model], *DROPOUT[parsed.dropout]]
    argv += ["--train-iters", str(steps)]
    # Several buckets of gradients: the default has room for the whole model.
    buckets = ["--zero-reduce-bucket-size", "20000"] if parsed.zero in (1, 2) else []
    check_training(pool, parsed.processes, argv, [*flags_for(parsed), *buckets])


def cells():
    for layout in LAYOUTS:
        for stage in (0, 1, 2) if parse_layout(layout).pipeline > 1 else (0, 1, 2, 3):
            for model in MODELS:
                chosen = f"{layout}-zero{stage}-{model}" in SAMPLE
                marks = () if chosen else (pytest.mark.proof,)
                yield pytest.param(f"{layout}-zero{stage}", model, marks=marks)


@pytest.mark.parametrize(("layout", "model"), list(cells()))
@pytest.mark.proof
def test_against_plain_torch(pool, layout, model):
    check(pool, layout, model, 20)


@pytest.mark.proof
@pytest.mark.parametrize(
    "layout", ["tp2-sp-dp2-zero3", "tp2-sp-pp2-zero1", "pp4-interleaved-zero1", "dp4-zero2"]
)
def test_drift_over_100_steps(pool, layout):
    """Stated, and bounded as well: by then small differences have had time to grow."""
    check(pool, layout, "gpt2", 100)
