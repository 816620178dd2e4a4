"""Loss and every gradient of every layout against one process, in float64.

The reference runs without DeepSpeed: a loop over the same micro batches. Each copy of each
parameter on each rank must have the reference's gradient, to 1e-12 of its size.
"""

from itertools import cycle

import pytest
from against_one_process import difference, reference
from training_jobs import LAYOUTS, TINY, depth

from megatron.apps.parity.layouts import flags_for, parse_layout

FLAGS = [*TINY, "--micro-batch-size", "2", "--train-iters", "1"]
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
).split()
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss".split()
BLOOM = ("--position-embedding-type alibi --embed-layernorm --parallel-residual --relu").split()
GEMMA2 = (
    "--position-embedding-type rope --normalization RMSNorm --apply-layernorm-1p --post-norm "
    "--scale-embeddings --glu-activation geglu --disable-bias-linear --sliding-window 5 "
    "--window-attn-skip-freq 2 --query-pre-attn-scalar 6 --attn-logit-softcapping 2 "
    "--final-logit-softcapping 3 --num-query-groups 2 --use-rope-scaling --rotary-base-local 100"
).split()
NEOX = (
    "--position-embedding-type rope --rotary-percent 0.5 --parallel-residual "
    "--shared-parallel-norm --qk-layernorm --num-query-groups 1"
).split()
GPT_OSS = (
    "--position-embedding-type rope --normalization RMSNorm --softmax-type learnable --quick-geglu "
    "--glu-linear-offset 1 --activation-func-clamp-value 0.02 --sliding-window 5 "
    "--window-attn-skip-freq 2 --num-query-groups 2 --untie-embeddings-and-output-weights"
).split()
QWEN3 = [*LLAMA, "--qk-layernorm", "--sliding-window", "4", "--num-query-groups", "2"]
LLAMA4 = (
    "--qk-l2-norm --attention-chunk-size 5 --num-query-groups 2 --window-attn-skip-freq 4 "
    "--no-rope-freq 4 --attention-temperature 0.5 --attention-temperature-floor 3"
).split()
GATED = (
    "--attention-output-gate --qk-layernorm --apply-layernorm-1p --rotary-interleaved "
    "--rotary-percent 0.5 --num-query-groups 2 --sliding-window 5 --window-attn-skip-freq 3"
).split()
GPTJ = [*NEOX[:6], *"--rotary-interleaved --disable-bias-linear --add-mlp-bias".split()]
XGLM = (
    "--position-embedding-type sinusoidal --position-embedding-offset 2 --scale-embeddings "
    "--disable-bias-linear --add-mlp-bias --add-proj-bias --query-pre-attn-scalar 1"
).split()
MODELS = {
    "gpt2": [],
    "gpt2-untied": ["--untie-embeddings-and-output-weights"],
    "gpt2-kv1": ["--num-query-groups", "1"],
    "llama-kv2": [*LLAMA, "--num-query-groups", "2"],
    "documents": DOCUMENTS,
    "documents-llama": [*LLAMA, *DOCUMENTS],
    "partition": ["--pipeline-partition", "parameters"],
    "recompute-full": "--recompute-granularity full --recompute-num-layers 3".split(),
    "recompute-block": "--recompute-granularity full --recompute-method block".split(),
    "recompute-selective": ["--recompute-activations", *LLAMA, "--num-query-groups", "1"],
    "bloom": [*BLOOM, *DOCUMENTS],
    "gemma2": GEMMA2,
    "gemma2-documents": [*GEMMA2, *DOCUMENTS, "--recompute-activations"],
    "neox": NEOX,
    "qwen3": [*QWEN3, "--recompute-granularity", "full"],
    "gpt-oss": GPT_OSS,
    "gpt-oss-selective": [*GPT_OSS, *DOCUMENTS, "--recompute-granularity", "selective"],
    "llama4": [*LLAMA, *LLAMA4],
    "llama4-documents": [*LLAMA, *LLAMA4, *DOCUMENTS, "--recompute-activations"],
    "gated": [*LLAMA, *GATED],
    "gated-selective": [*LLAMA, *GATED, *DOCUMENTS, "--recompute-granularity", "selective"],
    "opt": "--position-embedding-offset 2 --relu".split(),
    "dropout": [],
    # As further layouts would have them, so that the models above keep theirs.
    "gptj": GPTJ,
    "xglm-documents": [*XGLM, *DOCUMENTS],
}


def flags(layout: str, model: str, times: int) -> tuple[int, list[str]]:
    """Processes, and the flags of a cell: the smallest legal number of micro batches, or more."""
    parsed = parse_layout(layout)
    count = parsed.fewest_micro_batches * times
    argv = [*FLAGS, *MODELS[model], *depth(layout)]
    argv += ["--global-batch-size", str(2 * count * parsed.data)]
    return parsed.processes, argv + ([] if model == "dropout" else NO_DROPOUT)


def compared(pool, layout: str, model: str, times: int):
    """What differs between a layout and one process."""
    processes, argv = flags(layout, model, times)
    return difference(pool, processes, argv, flags_for(parse_layout(layout)))


TOGETHER = {
    "tp4": "qwen3", "tp2-sp": "neox", "tp4-sp": "gemma2-documents", "dp2": "dropout",
}  # fmt: skip
"""Fewer key heads than ranks where their norm's gradient is summed, all features at once, and the
masks of dropout where they are those of one process."""
NEVER_LEFT_OUT = {("tp4-sp", "gpt-oss")}
FOR_PROOF = (
    "pp4-zbh1 pp2-dualpipev_zb tp2-dp2 tp2-pp2 pp2-interleaved-dp2 tp2-pp2-interleaved "
    "pp2-dualpipev-dp2 tp2-pp2-dualpipev pp2-zbh1-dp2"
).split()
"""Layouts whose parts are in others of the sample, with slices of sequences for example."""
OF_TWO = ("tp2-sp", "pp2", "pp2-interleaved", "pp2-dualpipev", "pp2-interleaved")
"""Layouts of two processes, which have their models: some of these need eight blocks."""


def in_turn():
    """A model for each layout, and so every model: in turn, but for those that belong together."""
    models = list(MODELS)
    for layout, model in TOGETHER.items():
        one, other = LAYOUTS.index(layout), models.index(model)
        models[one], models[other] = models[other], models[one]
    return {layout: models[number % len(models)] for number, layout in enumerate(LAYOUTS)}


def cells():
    """Every cell; in the sample each model is in one, or two."""
    turns, layouts = in_turn(), cycle(OF_TWO)
    sample = {
        (next(layouts) if layout in FOR_PROOF else layout, model)
        for layout, model in turns.items()
        if layout not in FOR_PROOF[:2]
    } | NEVER_LEFT_OUT
    for number, layout in enumerate(LAYOUTS):
        for model in MODELS:
            if model == "dropout" and parse_layout(layout).dropout != "all":
                continue  # the masks are others there: megatron/config/layouts.py
            for times in (1, 2):
                chosen = (layout, model) in sample and times == 1 + number % 2
                marks = () if chosen else (pytest.mark.proof,)
                yield pytest.param(layout, model, times, marks=marks)


@pytest.mark.parametrize(("layout", "model", "times"), list(cells()))
def test_against_one_process(pool, layout, model, times):
    assert compared(pool, layout, model, times) is None


def test_dropout_acts():
    """Masks are drawn: with them the loss is another one."""
    (_, dry), (_, wet) = flags("pp2", "gpt2", 1), flags("pp2", "dropout", 1)
    assert abs(reference(*dry).loss - reference(*wet).loss) > 1e-3 * reference(*dry).loss
