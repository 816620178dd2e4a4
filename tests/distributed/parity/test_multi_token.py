"""Multi-token prediction: loss and every gradient of every layout against one process, in float64,
as test_gradients.py has it for the model without."""

import pytest
from against_one_process import difference
from training_jobs import CONTEXT_LAYOUTS, LAYOUTS, TINY

from megatron.apps.parity.layouts import flags_for, parse_layout

FLAGS = [
    *TINY, "--micro-batch-size", "2", "--train-iters", "1",
    *"--hidden-dropout 0 --attention-dropout 0 --mtp-num-layers 2".split(),
    *"--mtp-loss-scaling-factor 0.7".split(),
]  # fmt: skip
LLAMA = (
    "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
).split()
DOCUMENTS = "--reset-position-ids --reset-attention-mask".split()
EXPERTS = [
    *LLAMA,
    *"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16".split(),
    *"--moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01".split(),
]
RECURRENT = [*LLAMA, *DOCUMENTS, *"--linear-attention-freq 3".split()]
"""The last layer, whose configuration the blocks have, is a recurrent one."""
MODELS = {
    "gpt2": [],
    "llama-documents": [*LLAMA, *DOCUMENTS],
    "repeated": ["--mtp-use-repeated-layer", "--embed-layernorm", *DOCUMENTS],
    "detached": ["--mtp-detach-heads", *LLAMA],
    "bias": ["--lm-head-bias", "--untie-embeddings-and-output-weights"],
    "recompute": "--recompute-granularity full --recompute-num-layers 3".split(),
    "selective": ["--recompute-activations", *LLAMA],
    "experts": EXPERTS,
    "experts-repeated": [*EXPERTS, "--mtp-use-repeated-layer"],
    "mamba": [
        *RECURRENT, "--experimental-attention-variant", "mamba2",
        *"--mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 4".split(),
    ],
    "delta": [
        *RECURRENT, "--experimental-attention-variant", "gated_delta_net",
        *"--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8".split(),
        *"--linear-value-head-dim 6 --recompute-granularity full".split(),
    ],
    "latent": [
        *LLAMA, *DOCUMENTS, "--multi-latent-attention",
        *"--kv-lora-rank 16 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 8".split(),
    ],
}  # fmt: skip
ZERO = {f"dp2-zero{stage}": stage for stage in range(4)}
EXPERT = {"ep2": 2, "ep2-tp2": 4, "ep2-pp2": 4}
ALL = (*LAYOUTS, *CONTEXT_LAYOUTS, *ZERO, *EXPERT)
SAMPLE = {"tp2-sp/llama-documents", "ep2-pp2/experts-repeated", "cp2/llama-documents"}
"""Cells of the normal run; `make proof` has the rest."""


def layout_of(name: str) -> tuple[int, list[str]]:
    """Processes and flags of a layout."""
    if name in ZERO:
        return 2, ["--zero-stage", str(ZERO[name])]
    if name in EXPERT:
        others = {
            "ep2": [],
            "ep2-tp2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
            "ep2-pp2": ["--pipeline-model-parallel-size", "2"],
        }
        return EXPERT[name], ["--expert-model-parallel-size", "2", *others[name]]
    parsed = parse_layout(name)
    return parsed.processes, flags_for(parsed)


def batch(name: str) -> int:
    if name in ZERO or name in EXPERT:
        return 8
    parsed = parse_layout(name)
    return (
        2
        * parsed.fewest_micro_batches
        * parsed.data
        * (1 if parsed.fewest_micro_batches > 1 else 2)
    )


def cells():
    for layout in ALL:
        for model in MODELS:
            if layout in EXPERT and not model.startswith("experts"):
                continue
            marks = () if f"{layout}/{model}" in SAMPLE else (pytest.mark.proof,)
            yield pytest.param(layout, model, marks=marks, id=f"{layout}-{model}")


@pytest.mark.parametrize(("layout", "model"), list(cells()))
def test_gradients_against_one_process(pool, layout, model):
    layers = "8" if layout.startswith("pp4-") else "4"
    argv = [*FLAGS, *MODELS[model], "--num-layers", layers]
    argv += ["--global-batch-size", str(batch(layout))]
    processes, flags = layout_of(layout)
    assert difference(pool, processes, argv, flags) is None
