"""A checkpoint of any layout continues in any other.

Of every pair: weights and moments are bitwise those of the run that saved them, and the next losses
are those of the first layout to rounding. ``MEGATRON_MATRIX=FILE`` writes the table::

    MEGATRON_MATRIX=docs/evidence/checkpoint-matrix.md pytest -m "" tests/distributed/checkpoint/
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import FAMILIES, MODELS, NO_DROPOUT, blocks
from training_jobs import TINY
from whole_state import shares, whole

from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.engine.environment import distributed
from megatron.run.run import parse_run

STOP, END = 3, 6
RUN = [*f"--global-batch-size 4 --train-iters {END}".split(), *NO_DROPOUT]
OF_TWO_SAMPLES = [*RUN, "--global-batch-size", "8"]
"""For families with two samples in a micro batch: dualpipev needs four micro batches."""
FLAGS = {
    "gpt": [
        *TINY,
        *"--num-layers 4 --num-query-groups 2 --swiglu --position-embedding-type rope".split(),
        *"--normalization RMSNorm".split(),
        *RUN,
    ],
    "biencoder": [*FAMILIES["biencoder"], *MODELS["biencoder"]["projected"], *OF_TWO_SAMPLES],
    "bert": [*FAMILIES["bert"], *MODELS["bert"]["post-norm"], "--num-layers", "4", *OF_TWO_SAMPLES],
    "t5": [
        *FAMILIES["t5"],
        *MODELS["t5"]["relative"],
        *"--num-layers 3 --decoder-num-layers 3".split(),
        *OF_TWO_SAMPLES,
    ],
    "retro": [*FAMILIES["retro"], *MODELS["retro"]["modern"], *blocks("retro", 4), *OF_TWO_SAMPLES],
    "multi-token": [
        *TINY,
        *"--num-layers 4 --swiglu --normalization RMSNorm --mtp-num-layers 2".split(),
        *"--untie-embeddings-and-output-weights --mtp-loss-scaling-factor 0.5".split(),
        *RUN,
    ],
    "experts": [
        *TINY,
        *"--num-layers 4 --swiglu --normalization RMSNorm --num-experts 4".split(),
        *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
        *"--moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 32".split(),
        *"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01".split(),
        *RUN,
    ],
    "latent": [
        *TINY,
        *"--num-layers 4 --swiglu --position-embedding-type rope --normalization RMSNorm".split(),
        *"--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 6".split(),
        *"--qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm".split(),
        *RUN,
    ],
    "mamba": [
        *TINY,
        *"--num-layers 6 --hybrid-layer-pattern M-M*M- --mamba-num-groups 2".split(),
        *"--mamba-state-dim 8 --mamba-head-dim 8 --normalization RMSNorm".split(),
        *RUN,
    ],
}
LAYOUTS = {
    "dp1-zero0": (1, ""),
    "dp1-zero1": (1, "--zero-stage 1"),
    "dp2-zero0": (2, ""),
    "dp4-zero1": (4, "--zero-stage 1"),
    "dp2-zero2": (2, "--zero-stage 2"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "dp2-zero1-bf16": (2, "--zero-stage 1 --bf16"),
    "dp2-zero3-bf16": (2, "--zero-stage 3 --bf16"),
    "tp2-zero0": (2, "--tensor-model-parallel-size 2"),
    "tp4-sp-zero1": (4, "--tensor-model-parallel-size 4 --sequence-parallel --zero-stage 1"),
    "tp2-dp2-zero2": (4, "--tensor-model-parallel-size 2 --zero-stage 2"),
    "tp2-dp2-zero3": (4, "--tensor-model-parallel-size 2 --zero-stage 3"),
    "pp2-zero0": (2, "--pipeline-model-parallel-size 2"),
    "pp4-zero1": (4, "--pipeline-model-parallel-size 4 --zero-stage 1"),
    "pp2-dp2-zero1-bf16": (4, "--pipeline-model-parallel-size 2 --zero-stage 1 --bf16"),
    "tp2-sp-pp2-zero1": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--zero-stage 1",
    ),
    "pp2-dp2-zero2": (4, "--pipeline-model-parallel-size 2 --zero-stage 2"),
    "pp2-interleaved-zero1": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --zero-stage 1",
    ),
    "pp2-dualpipev-zero1": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev --zero-stage 1",
    ),
}
TENSOR = "--tensor-model-parallel-size 2"
WHOLE = f"{TENSOR} --expert-tensor-parallel-size 1"
EXPERT_LAYOUTS = {
    "ep2-zero0": (2, "--expert-model-parallel-size 2"),
    "ep4-zero1": (4, "--expert-model-parallel-size 4 --zero-stage 1"),
    "ep2-dp4-zero2": (4, "--expert-model-parallel-size 2 --zero-stage 2"),
    "ep2-zero3": (2, "--expert-model-parallel-size 2 --zero-stage 3"),
    "ep2-tp2-zero1": (4, f"{TENSOR} --expert-model-parallel-size 2 --zero-stage 1"),
    "ep2-tp2-sp-etp1-zero1": (
        2,
        f"{WHOLE} --sequence-parallel --expert-model-parallel-size 2 --zero-stage 1",
    ),
    "ep4-tp2-etp1-zero0": (4, f"{WHOLE} --expert-model-parallel-size 4"),
    "ep2-pp2-zero1-bf16": (
        4,
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1 --bf16",
    ),
}
"""Experts divided over data-parallel ranks, and over tensor-parallel ones too."""
CONTEXT_LAYOUTS = {
    "cp2-zero0": (2, "--context-parallel-size 2"),
    "cp2-zero3": (2, "--context-parallel-size 2 --zero-stage 3"),
    "cp4-a2a-zero2": (4, "--context-parallel-size 4 --cp-comm-type a2a --zero-stage 2"),
    "cp2-tp2-sp-zero1": (
        4, f"{TENSOR} --sequence-parallel --context-parallel-size 2 --zero-stage 1",
    ),
    "cp2-pp2-zero1-bf16": (
        4,
        "--context-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1 --bf16",
    ),
}  # fmt: skip
"""Sequences divided over ranks, of which checkpoints know nothing."""
SPLIT = "pp4-split1-zero1"
SEVEN = (
    "dp1-zero0 dp2-zero3 tp4-sp-zero1 pp4-zero1 tp2-sp-pp2-zero1 pp2-interleaved-zero1 "
    "pp2-dualpipev-zero1"
).split()
NAMES = {
    "gpt": list(LAYOUTS),
    "bert": SEVEN,
    "biencoder": SEVEN,
    "t5": [*SEVEN, SPLIT],
    "retro": SEVEN,
    "multi-token": SEVEN,
    "experts": ["dp1-zero1", *EXPERT_LAYOUTS],
    "mamba": [*SEVEN, "cp2-zero0"],
    "contexts": ["dp1-zero1", "dp2-zero3", "pp2-zero0", *CONTEXT_LAYOUTS],
    "latent": (
        "dp1-zero0 dp2-zero3 tp4-sp-zero1 tp2-dp2-zero2 tp2-sp-pp2-zero1 cp2-tp2-sp-zero1"
    ).split(),
}
LAYOUTS |= EXPERT_LAYOUTS | CONTEXT_LAYOUTS
FLAGS["contexts"] = FLAGS["gpt"]
FLAGS["delta"] = [
    *TINY,
    *"--num-layers 4 --swiglu --position-embedding-type rope --normalization RMSNorm".split(),
    *"--experimental-attention-variant gated_delta_net --linear-attention-freq 4".split(),
    *"--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 8".split(),
    *"--linear-value-head-dim 6 --attention-output-gate".split(),
    *RUN,
]
NAMES["delta"] = [*SEVEN, "cp2-tp2-sp-zero1"]
LAYOUTS[SPLIT] = 4, f"{LAYOUTS['pp4-zero1'][1]} --pipeline-model-parallel-split-rank 1"
SAMPLE = {
    ("t5", "pp2-interleaved-zero1", "dp1-zero0"),
    ("experts", "ep2-zero3", "ep2-tp2-sp-etp1-zero1"),
}
"""Of the other families than GPT."""
TITLES = {
    "gpt": "GPT",
    "bert": "BERT, post-norm, with both heads",
    "biencoder": "retriever, two BERTs with a projection",
    "t5": "T5 with relative positions",
    "retro": "Retro",
    "multi-token": "GPT with multi-token prediction",
    "experts": "GPT with experts",
    "contexts": "GPT, sequences divided",
    "latent": "GPT with latent attention",
    "delta": "GPT with Gated DeltaNet",
    "mamba": "GPT with Mamba-2",
}
RTOL = {"float32": 1e-6, "bf16": 1e-3}
"""Of losses; bfloat16 keeps eight bits of float32's 24."""


def pairs():
    """Every pair of each family; every sixteenth of GPT's layouts is a source in the sample."""
    for family, names in NAMES.items():
        for row, source in enumerate(names):
            for column, target in enumerate(names):
                in_sample = row % 16 == 0 and (column - row) % len(names) == 7
                if family != "gpt":
                    in_sample = (family, source, target) in SAMPLE
                marks = () if in_sample else (pytest.mark.proof,)
                case = f"{source}-to-{target}"
                name = case if family == "gpt" else f"{family}-{case}"
                yield pytest.param(family, source, target, marks=marks, id=name)


def run(argv):
    """Trains; returns what this rank held at the start and after ``STOP`` steps, and the record of
    all steps; for the pool."""
    record, states = RunRecord(), []
    parsed = parse_run(None, argv)

    def watch(result):
        record.add(result)
        if len(record.losses) == STOP:
            states.append(shares(trainer.engine))

    with distributed(parsed.config.parallel) as groups:
        trainer = watched_trainer(parsed, groups, watch)
        states.append(shares(trainer.engine))
        trainer.fit()
        return *states, record


def argv_of(family, name):
    """Processes and flags of a run. The loss of a retriever compares the samples of the micro
    batches of all data-parallel ranks, so that layouts have equal losses for equal sums of them."""
    size, flags = LAYOUTS[name]
    argv = [*FLAGS[family], *flags.split()]
    if family == "biencoder":
        samples = 1 if name.startswith("dp2") else 2
        # The rate of the others makes this loss jump, and rounding with it.
        argv += ["--micro-batch-size", str(samples), "--lr", "1e-3"]
    return size, argv


def rtol(name):
    return RTOL["bf16" if "bf16" in name else "float32"]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """By family and source: where its checkpoint is, its tensors when it was saved, and the losses
    that one process continues with, which are those of the same run without a stop."""
    made = {}

    def make(family, name):
        if (family, name) not in made:
            size, argv = argv_of(family, name)
            folder = tmp_path_factory.mktemp(name)
            saving = ["--save", str(folder), "--save-interval", str(STOP)]
            results = pool.run(size, run, [*argv, *saving])
            tensors = whole([saved for _, saved, _ in results])
            save = folder / f"global_step{STOP}"
            alone = argv_of(family, "dp1-zero0")[1]
            reference = pool.run(1, run, [*alone, "--load", str(save)])[0][2]
            unbroken = results[0][2].losses
            np.testing.assert_allclose(reference.losses, unbroken[STOP:], rtol=rtol(name))
            made[family, name] = save, tensors, reference.losses
        return made[family, name]

    return make


@pytest.fixture(scope="module")
def table():
    """Largest relative difference of a loss by family and pair; written when all are done."""
    cells = {}
    yield cells
    if "MEGATRON_MATRIX" in os.environ:
        Path(os.environ["MEGATRON_MATRIX"]).write_text(markdown(cells))


def markdown(cells):
    lines = [
        "# Which layout continues which",
        "",
        "Written by `MEGATRON_MATRIX=docs/evidence/checkpoint-matrix.md pytest -m '' "
        f"tests/distributed/checkpoint/test_matrix.py` on {time.strftime('%Y-%m-%d')}.",
        "",
        "A row saved a checkpoint after three steps and continued, a column loaded it. In every "
        "cell with a number all weights and moments were bitwise equal after loading; the number "
        "is the largest relative difference of the next three losses from those that one process "
        "(float32) continues with.",
    ]
    for family, names in NAMES.items():
        lines += ["", f"## {TITLES[family]}", "", "| from \\ to | " + " | ".join(names) + " |"]
        lines.append("|---|" + "---|" * len(names))
        for source in names:
            row = (cells.get((family, source, target)) for target in names)
            shown = " | ".join("-" if cell is None else f"{cell:.0e}" for cell in row)
            lines.append(f"| {source} | {shown} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("family", "source", "target"), list(pairs()))
def test_any_layout_continues_any(pool, saved, table, family, source, target):
    save, tensors, losses = saved(family, source)
    size, argv = argv_of(family, target)
    results = pool.run(size, run, [*argv, "--load", str(save)])
    loaded = whole([before for before, _, _ in results])
    assert loaded.keys() == tensors.keys()
    assert {kind for _, kind in loaded} == {"weight", "exp_avg", "exp_avg_sq"}
    for key, values in tensors.items():
        assert torch.equal(loaded[key], values), key
    found = results[0][2].losses
    assert len(found) == END - STOP
    np.testing.assert_allclose(found, losses, rtol=rtol(target))
    table[family, source, target] = float(np.max(np.abs(np.divide(found, losses) - 1)))
