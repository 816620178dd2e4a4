"""Every data-parallel layout trains as one plain process does (no DeepSpeed, torch's AdamW).

Step 1 must agree to 1e-6. After that rounding grows, see :mod:`against_one_process`.
"""

import json

import numpy as np
import pytest
from against_one_process import check_training
from samples import sampled
from training_jobs import TINY, train, train_plainly

STEPS = 10
FEW = 4
"""Steps where no drift is measured."""
FLAGS = [*TINY, "--train-iters", str(STEPS), "--lr-decay-style", "cosine", "--lr-warmup-iters", "3"]
SHAPES = {
    "gpt2": [],
    "llama": (
        "--swiglu --use-rotary-position-embeddings --normalization RMSNorm --disable-bias-linear "
        "--untie-embeddings-and-output-weights --num-query-groups 2"
    ).split(),
}


def with_shapes(name, values, kept=lambda value: True):
    """Both models with all values; a normal run has each value that is kept with one of them."""
    cases = [(shape, value) for value in values for shape in SHAPES]
    turn = [(list(SHAPES)[n % 2], value) for n, value in enumerate(filter(kept, values))]
    return pytest.mark.parametrize(
        ("plain", name), sampled(cases, turn.__contains__), indirect=["plain"]
    )


@pytest.fixture(scope="module")
def plain(request):
    return FLAGS + SHAPES[request.param]


CELLS = [(stage, size) for stage in (0, 1, 2, 3) for size in (1, 2, 4)]
SAMPLE = {(2, 2), (3, 2)}
"""The cells that every test run checks; `make proof` checks all. More layouts: test_training.py."""


@with_shapes("cell", CELLS, SAMPLE.__contains__)
def test_against_plain_torch(pool, plain, cell):
    stage, size = cell
    check_training(pool, size, plain, ["--zero-stage", str(stage)], fall=0.3)


RECOMPUTE = {
    "uniform": "--recompute-granularity full --recompute-num-layers 2".split(),
    "block": "--recompute-granularity full --recompute-method block".split(),
    "selective": ["--recompute-activations"],
    "mlp_act": ["--recompute-modules", "mlp_act"],
}
ZERO3 = {
    "gathered": {},
    "sub-groups": {"sub_group_size": 3000},
    "hpz": {"zero_hpz_partition_size": 2},
}


def zero3(path, **options):
    """Flags for stage 3, where no parameter of this small model may stay gathered."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **options}
    path.write_text(json.dumps({"zero_optimization": zero}))
    return ["--deepspeed_config", str(path)]


def few_steps_follow(pool, plain, argv):
    reference = train_plainly(plain)
    record = pool.run(2, train, [*plain, *argv, "--exit-interval", str(FEW)])[0]
    np.testing.assert_allclose(record.losses, reference.losses[:FEW], rtol=2e-6)
    np.testing.assert_allclose(record.norms, reference.norms[:FEW], rtol=1e-5)


@with_shapes("options", ZERO3, lambda name: name != "gathered")
def test_zero3_options_against_plain_torch(pool, plain, tmp_path, options):
    few_steps_follow(pool, plain, zero3(tmp_path / "ds.json", **ZERO3[options]))


@with_shapes("recompute", RECOMPUTE, ("uniform", "mlp_act").__contains__)
def test_recomputation_against_plain_torch(pool, plain, tmp_path, recompute):
    few_steps_follow(pool, plain, [*zero3(tmp_path / "ds.json"), *RECOMPUTE[recompute]])


@with_shapes("stage", [0, 3], lambda stage: stage == 3)
def test_tensor_parallel_against_plain_torch(pool, plain, stage):
    size = 4 if stage == 3 else 2  # one replica's weights are not partitioned
    layout = ["--zero-stage", str(stage), "--tensor-model-parallel-size", "2"]
    check_training(pool, size, [*plain, "--attention-dropout", "0"], layout, fall=0.3)


def test_batch_rampup_and_samples(pool):
    """The batch grows while training; lengths and learning rate count samples."""
    flags = [*TINY, "--rampup-batch-size", "2", "2", "16", "--global-batch-size", "8"]
    flags += ["--train-samples", "64", "--lr-warmup-samples", "8"]
    reference = train_plainly(flags)
    record = pool.run(2, train, [*flags, "--zero-stage", "1"])[0]
    assert len(record.losses) > 8, "without the ramp there were 8 steps"
    np.testing.assert_allclose(record.losses, reference.losses, rtol=2e-5)
    np.testing.assert_allclose(record.norms, reference.norms, rtol=2e-4)


@pytest.mark.parametrize("flag", ["--reset-position-ids", "--reset-attention-mask"])
def test_document_masks(pool, flag):
    flags = [*TINY, "--train-iters", "4", flag, "--eod-mask-loss"]
    reference = train_plainly(flags)
    record = pool.run(2, train, [*flags, "--zero-stage", "2"])[0]
    np.testing.assert_allclose(record.losses, reference.losses, rtol=2e-6)
    plain_losses = train_plainly([*TINY, "--train-iters", "4"]).losses
    assert abs(reference.losses[0] - plain_losses[0]) > 1e-4, "the flags must act"


@pytest.mark.parametrize("stage", sampled(range(4), lambda stage: stage in (0, 3)))
def test_clipping_acts(pool, stage):
    """A gradient norm above --clip-grad changes the update as torch's clipping does.

    SGD, because Adam hardly sees the length of a gradient.
    """
    flags = [*TINY, "--train-iters", "3", "--zero-stage", str(stage), "--optimizer", "sgd"]
    flags += ["--lr", "1.0", "--lr-decay-style", "constant", "--weight-decay", "0"]
    loose = pool.run(2, train, [*flags, "--clip-grad", "0"])[0]
    tight = pool.run(2, train, [*flags, "--clip-grad", "0.01"])[0]
    assert loose.norms[0] == pytest.approx(tight.norms[0], rel=1e-6)
    assert loose.norms[0] > 0.1
    assert abs(tight.losses[2] - tight.losses[0]) < abs(loose.losses[2] - loose.losses[0])
