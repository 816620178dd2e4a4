"""Loss and gradients of models with Mamba-2 in every layout against one process, in float64.

The reference runs without DeepSpeed and without other ranks; that its layer equals transformers' is
tested in tests/formats/huggingface.
"""

import pytest
from against_one_process import check_training, difference
from training_jobs import TINY

FLAGS = [
    *TINY[2:], "--micro-batch-size", "2", "--train-iters", "1", "--hidden-dropout", "0",
    "--attention-dropout", "0", "--normalization", "RMSNorm", "--mamba-state-dim", "8",
    "--mamba-head-dim", "8", "--global-batch-size", "16",
]  # fmt: skip
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss".split()
MODELS = {
    "bamba": [
        *"--experimental-attention-variant mamba2 --linear-attention-freq [1,0,1,1]".split(),
        *"--num-layers 4 --mamba-num-groups 4 --mamba-proj-bias --swiglu".split(),
    ],
    "documents": [
        *"--hybrid-layer-pattern M-M*M-MM --mamba-num-groups 2 --mamba-norm-before-gate".split(),
        *"--mamba-num-heads 8 --mamba-step-limits 0.5 1.5".split(), *DOCUMENTS,
    ],
    "one-group": [
        *"--hybrid-layer-pattern MM*-M- --mamba-num-groups 1 --disable-bias-linear".split(),
        *"--recompute-granularity selective".split(), *DOCUMENTS,
    ],
    "experts": [
        *"--hybrid-layer-pattern MEM*-EM* --mamba-num-groups 2 --num-experts 4".split(),
        *"--squared-relu --moe-shared-expert-intermediate-size 32 --disable-bias-linear".split(),
        *"--moe-aux-loss-coeff 0.1 --recompute-granularity full".split(),
    ],
}  # fmt: skip
MODELS["adapters"] = [*MODELS["one-group"], *"--lora --lora-rank 3 --lora-alpha 5".split()]
TENSOR, SLICED, PIPELINE = (
    "--tensor-model-parallel-size 2".split(),
    ["--sequence-parallel"],
    "--pipeline-model-parallel-size 2".split(),
)
CP2, CP4 = (["--context-parallel-size", str(size)] for size in (2, 4))
LAYOUTS = {
    "tp2": (2, TENSOR),
    "tp2-sp": (2, [*TENSOR, *SLICED]),
    "tp4-sp": (4, ["--tensor-model-parallel-size", "4", *SLICED]),
    "pp2": (2, PIPELINE),
    "pp2-dp2": (4, PIPELINE),
    "pp2-interleaved": (2, [*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"]),
    "pp2-dualpipev": (2, [*PIPELINE, "--pipeline-schedule", "dualpipev"]),
    "tp2-sp-pp2": (4, [*TENSOR, *SLICED, *PIPELINE]),
    "cp2": (2, CP2),
    "cp2-a2a": (2, [*CP2, "--cp-comm-type", "a2a"]),
    "cp4": (4, CP4),
    "cp2-tp2": (4, [*CP2, *TENSOR]),
    "cp2-tp2-sp": (4, [*CP2, *TENSOR, *SLICED]),
    "cp2-pp2": (4, [*CP2, *PIPELINE]),
}
EXPERT = ["--expert-model-parallel-size", "2"]
EXPERT_LAYOUTS = {
    "ep2": (2, EXPERT),
    "ep2-tp2-sp": (4, [*EXPERT, *TENSOR, *SLICED]),
    "ep2-pp2": (4, [*EXPERT, *PIPELINE]),
    "ep2-cp2": (4, [*EXPERT, *CP2]),
    "ep2-zero3": (2, [*EXPERT, "--zero-stage", "3"]),
}


STEPS = 10
TRAININGS = {
    "dp2-zero1": (2, ["--zero-stage", "1"]),
    "dp2-zero2": (2, ["--zero-stage", "2"]),
    "dp2-zero3": (2, ["--zero-stage", "3"]),
    "tp2-zero3": (4, [*TENSOR, "--zero-stage", "3"]),
    "pp2-zero1": (2, [*PIPELINE, "--zero-stage", "1"]),
    "cp2-zero2": (2, [*CP2, "--zero-stage", "2"]),
}


@pytest.mark.proof
@pytest.mark.parametrize("layout", TRAININGS)
@pytest.mark.parametrize("model", ["bamba", "one-group"])
def test_training_against_plain_torch(pool, layout, model):
    processes, flags = TRAININGS[layout]
    argv = [*FLAGS, *MODELS[model], "--train-iters", str(STEPS), "--global-batch-size", "8"]
    check_training(pool, processes, argv, flags, fall=0.02)


SAMPLE = {("tp2-sp", "documents"), ("cp2", "documents"), ("tp2", "one-group")}


def cells():
    """Every cell; those of the sample run by default."""
    for layout in (*LAYOUTS, *EXPERT_LAYOUTS):
        for model in MODELS if layout in LAYOUTS else ["experts"]:
            marks = () if (layout, model) in SAMPLE else (pytest.mark.proof,)
            yield pytest.param(layout, model, marks=marks)


@pytest.mark.parametrize(("layout", "model"), list(cells()))
def test_against_one_process(pool, layout, model):
    processes, flags = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    argv = [*FLAGS, *MODELS[model]]
    assert difference(pool, processes, argv, flags) is None
