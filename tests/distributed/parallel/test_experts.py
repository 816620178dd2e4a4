"""Loss, gradients and norm of models with experts in every layout against one process, in float64.

The reference runs without DeepSpeed and without other ranks; that its layer equals a loop over the
experts is tested in tests/features/experts/test_layer.py.
"""

from itertools import product
from unittest import mock

import pytest
import torch
from against_one_process import difference, layers_of
from samples import sampled
from training_jobs import TINY

from megatron.apps.parity import gradients as parity
from megatron.apps.parity.gradients import first_difference

FLAGS = [
    *TINY, "--num-layers", "4", "--micro-batch-size", "2", "--train-iters", "1",
    "--hidden-dropout", "0", "--attention-dropout", "0", "--num-experts", "4",
]  # fmt: skip
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 64".split()
MODELS = {
    "switch": "--moe-router-topk 2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1",
    "biased": "--moe-router-topk 1 --moe-router-pre-softmax --moe-router-load-balancing-type "
    "seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-router-bias",
    "dropping": "--moe-router-topk 2 --moe-expert-capacity-factor 0.7 --moe-aux-loss-coeff 0.1",
    "by-position": "--moe-router-topk 2 --moe-expert-capacity-factor 0.7 "
    "--moe-token-drop-policy position",
    "deepseek": "--moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1,1,1]",
    "shared-gate": "--moe-router-topk 3 --moe-shared-expert-intermediate-size 32 "
    "--moe-shared-expert-gate --moe-layer-freq 2 --moe-ffn-hidden-size 16",
    "latent": "--moe-router-topk 2 --moe-latent-size 16 --moe-aux-loss-coeff 0.1",
    "residual": "--topk 1 --mlp-type residual --moe-loss-coeff 0.1 --expert-interval 2 "
    "--moe-train-capacity-factor 0.8",
    "top2-gate": "--topk 2 --expert-interval 2 --moe-loss-coeff 0.1 "
    "--disable-moe-top2-2nd-expert-sampling",
    "recomputed": "--moe-router-topk 2 --moe-aux-loss-coeff 0.1 --recompute-granularity full",
}  # fmt: skip
TENSOR, WHOLE, EP2, EP4 = (
    flags.split()
    for flags in (
        "--tensor-model-parallel-size 2", "--expert-tensor-parallel-size 1",
        "--expert-model-parallel-size 2", "--expert-model-parallel-size 4",
    )
)  # fmt: skip
SLICED, PIPELINE = ["--sequence-parallel"], ["--pipeline-model-parallel-size", "2"]
CP2 = ["--context-parallel-size", "2"]
LAYOUTS = {
    "dp2": (2, []),
    "ep2": (2, EP2),
    "ep4": (4, EP4),
    "ep2-dp4": (4, EP2),
    "tp2": (2, TENSOR),
    "tp2-sp": (2, [*TENSOR, *SLICED]),
    "tp2-etp1": (2, [*TENSOR, *WHOLE]),
    "tp2-sp-etp1": (2, [*TENSOR, *WHOLE, *SLICED]),
    "ep2-tp2": (4, [*EP2, *TENSOR]),
    "ep2-tp2-sp": (4, [*EP2, *TENSOR, *SLICED]),
    "ep2-tp2-etp1": (2, [*EP2, *TENSOR, *WHOLE]),
    "ep2-tp2-sp-etp1": (2, [*EP2, *TENSOR, *WHOLE, *SLICED]),
    "ep4-tp2-sp-etp1": (4, [*EP4, *TENSOR, *WHOLE, *SLICED]),
    "ep2-tp2-etp1-dp2": (4, [*EP2, *TENSOR, *WHOLE]),
    "pp2": (2, PIPELINE),
    "ep2-pp2": (4, [*EP2, *PIPELINE]),
    "ep2-pp2-interleaved": (
        4, [*EP2, *PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2"]
    ),
    "ep2-pp2-dualpipev": (4, [*EP2, *PIPELINE, "--pipeline-schedule", "dualpipev"]),
    "tp2-sp-pp2": (4, [*TENSOR, *SLICED, *PIPELINE]),
    "ep2-tp2-sp-pp2-etp1": (4, [*EP2, *TENSOR, *WHOLE, *SLICED, *PIPELINE]),
    "cp2": (2, CP2),
    "cp2-a2a": (2, [*CP2, "--cp-comm-type", "a2a"]),
    "cp2-allgather": (2, [*CP2, "--cp-comm-type", "allgather"]),
    "cp4-a2a+p2p": (
        4, "--context-parallel-size 4 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 2 2".split()
    ),
    "cp2-dp2": (4, CP2),
    "ep2-cp2": (4, [*EP2, *CP2]),
    "cp2-tp2": (4, [*CP2, *TENSOR]),
    "cp2-tp2-sp": (4, [*CP2, *TENSOR, *SLICED]),
    "cp2-tp2-etp1": (4, [*CP2, *TENSOR, *WHOLE]),
    "cp2-tp2-sp-etp1": (4, [*CP2, *TENSOR, *WHOLE, *SLICED]),
    "cp2-pp2": (4, [*CP2, *PIPELINE]),
}  # fmt: skip


CONTEXT_SAMPLE = {("cp2-tp2-sp-etp1", "by-position")}


def cells():
    """Every cell; in the sample each second layout has one model, and every model a layout; those
    of a context have one cell."""
    for number, layout in enumerate(LAYOUTS):
        for place, model in enumerate(MODELS):
            chosen = place == (number // 2) % len(MODELS) and number % 2 == 1 and "cp" not in layout
            chosen |= (layout, model) in CONTEXT_SAMPLE
            yield pytest.param(layout, model, marks=() if chosen else (pytest.mark.proof,))


@pytest.mark.parametrize(("layout", "model"), list(cells()))
def test_against_one_process(pool, layout, model):
    check(pool, MODELS[model], *LAYOUTS[layout])


def check(pool, model, processes, flags):
    argv = [*FLAGS, *LLAMA, *model.split(), "--global-batch-size", "16"]
    assert difference(pool, processes, argv, flags) is None


ROPE = "--moe-router-topk 2 --moe-aux-loss-coeff 0.1 --position-embedding-type rope"
DIVIDED_MODELS = {
    "one-key-head": f"{ROPE} --num-query-groups 1",
    "window": f"{ROPE} --sliding-window 5 --num-query-groups 2",
    "softcap-documents": f"{ROPE} --attn-logit-softcapping 2 --reset-position-ids "
    "--reset-attention-mask --eod-mask-loss",
}
DIVIDED = {
    "ep2-cp2": (4, [*EP2, *CP2]),
    "cp2-pp2-interleaved": (4, [*CP2, *PIPELINE, "--pipeline-schedule", "interleaved"]),
    "cp2-pp2-dualpipev": (4, [*CP2, *PIPELINE, "--pipeline-schedule", "dualpipev"]),
}


@pytest.mark.proof
@pytest.mark.parametrize("model", DIVIDED_MODELS)
@pytest.mark.parametrize("kind", ["p2p", "a2a", "allgather"])
@pytest.mark.parametrize("layout", DIVIDED)
def test_divided_sequences_against_one_process(pool, layout, kind, model):
    processes, flags = DIVIDED[layout]
    check(pool, DIVIDED_MODELS[model], processes, [*flags, "--cp-comm-type", kind])


LOSSES = "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
BIASED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
BIASES = {"even": [0.0] * 4, "one rank": [9.0, 9.0, 0.0, 0.0], "one expert": [9.0, 0.0, 0.0, 0.0]}
"""Experts that every token goes to, so that a rank, or two, get none."""


def numbers(argv, bias):
    """One step in float64 with these biases: the record, the means of the losses by name, and the
    biases after the step; for the pool."""
    step, result = parity._step, []

    def watched(run, engine, mesh):
        for buffer in engine.buffers.values():
            buffer.values.copy_(torch.tensor(bias))
        record = step(run, engine, mesh)
        of_batches = engine.backend.losses
        sums = sum(of_batches) if len(of_batches) else torch.zeros(len(engine.spec.losses)).double()
        count = 16 // 2 // mesh.samples.size
        losses = {n: float(loss) for n, loss in engine.mean_losses(sums, count).items()}
        engine.kernels.end_step()
        result.extend([losses, {n: buffer.values for n, buffer in engine.buffers.items()}])
        return record

    with mock.patch.object(parity, "_step", watched):
        return parity.gradients(argv), *result


SPREAD = ("ep2", "ep4", "ep2-tp2", "ep2-tp2-sp-etp1", "ep4-tp2-sp-etp1", "ep2-pp2", "tp2-etp1",
          "cp2", "ep2-cp2", "cp2-tp2-sp-etp1")  # fmt: skip
SAMPLE = {("ep2", "one rank"), ("ep4-tp2-sp-etp1", "one expert"), ("ep2-pp2", "even")}


@pytest.mark.parametrize(
    ("layout", "bias"), sampled(list(product(SPREAD, BIASES)), SAMPLE.__contains__)
)
def test_losses_and_biases_with_ranks_without_tokens(pool, layout, bias):
    """Logged losses, each by itself, and the biases that the rule gives, of any spread of tokens
    over experts; with one expert a token (``one expert``) the others get no token at all."""
    choices = "1" if bias == "one expert" else "2"
    flags = [*LOSSES.split(), *BIASED.split(), "--moe-router-topk", choices]
    argv = [*FLAGS, *LLAMA, *flags, "--global-batch-size", "16"]
    (expected, losses, biases), *_ = pool.run(1, numbers, argv, BIASES[bias])
    processes, more = LAYOUTS[layout]
    results = pool.run(processes, numbers, [*argv, *more], BIASES[bias])
    layers = layers_of(*argv)
    assert first_difference([record for record, _, _ in results], expected, layers) is None
    assert losses.keys() == {"lm loss", "load_balancing_loss", "z_loss"}
    for _, ours, after in results:
        assert ours == pytest.approx(losses, rel=1e-12)
        for name, values in after.items():
            assert torch.equal(values, biases[name]), name
            assert not torch.equal(values, torch.tensor(BIASES[bias])), "the rule must act"
    assert {name for _, _, after in results for name in after} == biases.keys()
