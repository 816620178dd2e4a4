"""Loss, every gradient and norm of sequences that ranks divide, in every layout and with every
communication, against one process, in float64; and dropout masks.

The reference runs without DeepSpeed and without other ranks.
"""

import json
from itertools import product

import numpy as np
import pytest
import torch
from against_one_process import difference
from samples import sampled
from training_jobs import TINY

from megatron.apps.parity.layouts import flags_for, parse_layout
from megatron.engine.environment import distributed
from megatron.parallel.layers import Dropout
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

FLAGS = [
    *(flag for flag in TINY if flag != "--mock-data"),
    *"--num-layers 4 --micro-batch-size 2 --global-batch-size 8 --train-iters 1".split(),
    *"--hidden-dropout 0 --attention-dropout 0".split(),
]  # fmt: skip
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
LONGROPE = json.dumps(
    {
        "rope_type": "longrope", "original_max_position_embeddings": 8,
        "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 5.0, 9.0],
    }
)  # fmt: skip
"""Frequencies of sequences above 8 tokens differ: whole ones, and not a rank's part."""
MODELS = {
    "one-key-head": f"--mock-data {LLAMA} --num-query-groups 1 --recompute-granularity selective",
    "documents": "--mock-data --reset-position-ids --reset-attention-mask --eod-mask-loss",
    "window": f"--mock-data {LLAMA} --sliding-window 5 --num-query-groups 2 --rope-scaling",
    "llama4": f"--mock-data {LLAMA} --attention-chunk-size 5 --window-attn-skip-freq 2 "
    "--qk-l2-norm --no-rope-freq 2 --attention-temperature 0.5 --attention-temperature-floor 3 "
    "--reset-position-ids --reset-attention-mask --num-query-groups 2",
    "gate": f"--mock-data {LLAMA} --attention-output-gate --rotary-interleaved "
    "--num-query-groups 1",
    "softcap": "--mock-data --attn-logit-softcapping 2 --recompute-granularity full",
    "alibi": "--mock-data --position-embedding-type alibi --softmax-type learnable",
    "answers": f"{LLAMA} --sft --split 1,0,0 --sft-padding seq-length --neftune-noise-alpha 5 "
    "--log-token-accuracy",
}
TENSOR, PIPELINE, CONTEXT = (
    f"--{axis}-parallel-size 2".split() for axis in ("tensor-model", "pipeline-model", "context")
)
LAYOUTS = {
    "cp2": (2, []),
    "cp2-tp2": (4, TENSOR),
    "cp2-tp2-sp": (4, [*TENSOR, "--sequence-parallel"]),
    "cp2-pp2": (4, PIPELINE),
    "cp2-pp2-interleaved": (4, [*PIPELINE, "--pipeline-schedule", "interleaved"]),
    "cp2-pp2-dualpipev": (4, [*PIPELINE, "--pipeline-schedule", "dualpipev"]),
    "cp2-dp2": (4, []),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """A file of prompts and answers, of which few tokens count, in different parts of rows; padding
    fills these up."""
    path, rng = tmp_path_factory.mktemp("data") / "pairs.jsonl", np.random.default_rng(3)
    with path.open("w") as file:
        for _ in range(12):
            prompt, answer = (" ".join(map(str, rng.integers(0, 99, n)))
                              for n in rng.integers(1, 9, 2))  # fmt: skip
            file.write(json.dumps({"prompt": prompt, "completion": f" {answer}"}) + "\n")
    return str(path)


def flags_of(model, answers):
    more = {"window": [LONGROPE], "answers": ["--data-path", answers]}
    return [*FLAGS, *MODELS[model].split(), *more.get(model, [])]


def check(pool, argv, processes, flags):
    assert difference(pool, processes, argv, flags) is None


CELLS = list(product(LAYOUTS, ("p2p", "a2a", "allgather"), MODELS))
SAMPLE = {("cp2-tp2-sp", "p2p", "answers"), ("cp2-pp2", "a2a", "documents")}


@pytest.mark.parametrize(("layout", "kind", "model"), sampled(CELLS, SAMPLE.__contains__))
def test_two_ranks_against_one_process(pool, answers, layout, kind, model):
    processes, flags = LAYOUTS[layout]
    flags = [*CONTEXT, "--cp-comm-type", kind, *flags]
    check(pool, flags_of(model, answers), processes, flags)


FOUR = {
    **{kind: [kind] for kind in ("p2p", "a2a", "allgather")},
    "two-levels": ["a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "2"],
    "mixed": "p2p a2a allgather a2a+p2p --hierarchical-context-parallel-sizes 2 2".split(),
}
SAMPLE_OF_FOUR = {("mixed", "window")}


@pytest.mark.parametrize(
    ("kind", "model"), sampled(product(FOUR, MODELS), SAMPLE_OF_FOUR.__contains__)
)
def test_four_ranks_against_one_process(pool, answers, kind, model):
    """Each key head is that of up to four ranks."""
    flags = ["--context-parallel-size", "4", "--cp-comm-type", *FOUR[kind]]
    check(pool, flags_of(model, answers), 4, flags)


def masks(argv):
    """The mask of hidden dropout, and its part of the sequence; for the pool."""
    config = parse_run(None, argv).config
    with distributed(config.parallel) as mesh:
        tp = TensorParallel.of(mesh, config.parallel)
        torch.manual_seed(5)
        x_BSH = torch.ones(2, 16 // tp.context.size // tp.slices, 32)
        with torch.no_grad():
            dropped = Dropout(0.3, tp).train()(x_BSH)
            following = torch.rand(4)
            with tp.random_inside():
                inside = torch.rand(4)
        return tp.context.positions(16), dropped, following, inside


@pytest.mark.parametrize("layout", sampled(("cp2-tp2", "cp4"), ("cp2-tp2").__eq__))
def test_hidden_dropout_is_that_of_one_process(pool, layout):
    parsed = parse_layout(layout)
    assert parsed.dropout == "hidden"
    argv = [*FLAGS, "--mock-data"]
    ((_, whole, following, _),) = pool.run(1, masks, argv)
    of_ranks = pool.run(parsed.processes, masks, [*argv, *flags_for(parsed)])
    for places_S, dropped_BSH, after, _ in of_ranks:
        assert torch.equal(dropped_BSH, whole[:, places_S])
        assert torch.equal(after, following), "what is drawn afterwards is that of one process too"
    inside = torch.stack([drawn for *_, drawn in of_ranks])
    assert len(inside.unique(dim=0)) == parsed.processes, "cut layers draw their own"
