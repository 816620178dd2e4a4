"""Half precision at every ZeRO stage, loss scaling, and steps that are not finite."""

from unittest import mock

import numpy as np
import pytest
from family_models import FAMILIES, NO_DROPOUT
from samples import sampled
from training_jobs import TINY, train, train_plainly

from megatron.engine import train_engine

FLAGS = [*TINY, "--train-iters", "6", "--zero-stage"]


@pytest.fixture(scope="module")
def plain():
    return train_plainly([*TINY, "--train-iters", "6"])


@pytest.mark.parametrize("stage", sampled(range(4), lambda stage: stage in (1, 3)))
def test_bf16_follows_fp32(pool, plain, stage):
    record = pool.run(2, train, [*FLAGS, str(stage), "--bf16"])[0]
    np.testing.assert_allclose(record.losses, plain.losses, rtol=3e-3)
    assert record.norms[0] == pytest.approx(plain.norms[0], rel=5e-3)
    assert record.losses != plain.losses, "bf16 must round"


SUMS_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"


@pytest.mark.parametrize("stage", sampled([1, 2, 3], lambda stage: stage == 3))
@pytest.mark.proof
def test_sums_in_fp32_are_nearer_to_fp32(pool, stage):
    """32 small gradients: bfloat16 sums lose more of them than float32 sums do."""
    flags = [*TINY, "--train-iters", "1", "--global-batch-size", "64"]
    exact = train_plainly(flags).norms[0]
    flags += ["--zero-stage", str(stage), "--bf16"]
    rounded = pool.run(2, train, flags)[0].norms[0]
    summed = pool.run(2, train, [*flags, SUMS_IN_FP32])[0].norms[0]
    assert summed != rounded
    assert summed == pytest.approx(exact, rel=2e-3)


PIPELINES = {
    "1f1b": "--pipeline-model-parallel-size 2".split(),
    "interleaved": "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved".split(),
    "dualpipev": "--pipeline-model-parallel-size 2 --pipeline-schedule dualpipev".split(),
    "tensor": "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
    "--sequence-parallel --attention-dropout 0 --hidden-dropout 0".split(),
}
FORMATS = {
    "autocast": ["--zero-stage", "0", "--bf16"],
    "bf16": ["--zero-stage", "1", "--bf16"],
    "bf16-sums-fp32": ["--zero-stage", "1", "--bf16", SUMS_IN_FP32],
    "fp16": ["--zero-stage", "1", "--fp16", "--initial-loss-scale", "4096"],
    "fp16-unpartitioned": ["--zero-stage", "0", "--fp16", "--initial-loss-scale", "4096"],
    "fp16-sums-fp32": ["--zero-stage", "1", "--fp16", "--initial-loss-scale", "4096", SUMS_IN_FP32],
    "bf16-residual-fp32": ["--zero-stage", "1", "--bf16", "--fp32-residual-connection"],
}


@pytest.mark.parametrize(
    ("pipeline", "precision"),
    [
        # The normal run has each pipeline and, but for plain bf16, each format, in turn.
        pytest.param(pipeline, form, marks=() if (i + j) % 5 == 0 else pytest.mark.proof)
        for i, pipeline in enumerate(PIPELINES)
        for j, form in enumerate(FORMATS)
    ],
)
def test_pipelines_follow_fp32(pool, pipeline, precision):
    layout = PIPELINES[pipeline]
    flags = [*TINY, "--num-layers", "4", "--train-iters", "4"]
    expected = train_plainly([*flags, *(layout[-4:] if pipeline == "tensor" else [])])
    size = 4 if pipeline == "tensor" else 2
    record = pool.run(size, train, [*flags, *layout, *FORMATS[precision]])[0]
    assert not any(record.skipped)
    np.testing.assert_allclose(record.losses, expected.losses, rtol=3e-3)
    assert record.norms[0] == pytest.approx(expected.norms[0], rel=5e-3)
    assert record.losses != expected.losses, "half precision must round"


@pytest.mark.proof
@pytest.mark.parametrize("stage", [["0"], ["1", "--accumulate-allreduce-grads-in-fp32"]])
@pytest.mark.parametrize("family", ["t5", "retro", "bert"])
def test_families_with_a_wide_residual_stream(pool, family, stage):
    """The output of an encoder travels in bfloat16, next to hidden states in float32."""
    model = [*FAMILIES[family], *NO_DROPOUT, "--train-iters", "3"]
    expected = train_plainly(model)
    flags = ["--bf16", "--fp32-residual-connection", *PIPELINES["1f1b"], "--zero-stage", *stage]
    record = pool.run(2, train, [*model, *flags])[0]
    np.testing.assert_allclose(record.losses, expected.losses, rtol=3e-3)


@pytest.mark.parametrize("family", ["t5", pytest.param("biencoder", marks=pytest.mark.proof)])
def test_only_the_output_of_a_stack_crosses_to_the_next(pool, family):
    """It is in bfloat16, as it comes from a norm or a head, where hidden states are in float32."""
    model = [*FAMILIES[family], *NO_DROPOUT, "--train-iters", "3"]
    expected = train_plainly(model)
    blocks = {"t5": "4,4", "biencoder": "8,8"}[family]
    flags = ["--bf16", "--fp32-residual-connection", "--zero-stage", "1"]
    flags += [*PIPELINES["1f1b"], "--pipeline-partition", blocks]
    record = pool.run(2, train, [*model, *flags])[0]
    np.testing.assert_allclose(record.losses, expected.losses, rtol=3e-3)


@pytest.mark.parametrize(
    ("layout", "precision", "stage"),
    [
        # The normal run has fp16 at stage 3; bf16 is in the pipelines above.
        pytest.param(*case, marks=() if number == 14 else pytest.mark.proof)
        for number, case in enumerate(
            (layout, form, stage)
            for form in ("--bf16", "--fp16")
            for stage in range(4)
            for layout in ([], ["--sequence-parallel"])
        )
    ],
)
def test_tensor_parallel_follows_fp32(pool, layout, stage, precision):
    """One key-value head on both ranks, whose weights are parameters of their own."""
    flags = [*TINY, "--num-query-groups", "1", "--train-iters", "4", "--attention-dropout", "0"]
    flags += ["--hidden-dropout", "0"]
    expected = train_plainly(flags)
    layout = [*layout, "--tensor-model-parallel-size", "2", "--zero-stage", str(stage)]
    scale = ["--initial-loss-scale", "4096"]
    record = pool.run(4, train, [*flags, *layout, precision, *scale])[0]
    assert not any(record.skipped)
    np.testing.assert_allclose(record.losses, expected.losses, rtol=3e-3)
    assert record.norms[0] == pytest.approx(expected.norms[0], rel=5e-3)
    assert record.losses != expected.losses, "half precision must round"


@pytest.mark.parametrize("stage", sampled(range(4), lambda stage: stage == 0))
def test_fp16_follows_fp32(pool, plain, stage):
    flags = [*FLAGS, str(stage), "--fp16", "--initial-loss-scale", "4096"]
    record = pool.run(2, train, flags)[0]
    np.testing.assert_allclose(record.losses, plain.losses, rtol=1e-3)
    assert record.norms[0] == pytest.approx(plain.norms[0], rel=1e-3)


@pytest.mark.parametrize("stage", sampled([1, 2, 3], lambda stage: stage == 2))
def test_growing_loss_scale_changes_nothing(pool, stage):
    """The scale doubles every other step; losses and norms stay those of a scale that does not.

    DeepSpeed itself divides by the doubled scale on such a step, which is why it is not left to it.
    """
    flags = [*FLAGS, str(stage), "--fp16", "--initial-loss-scale", "256", "--optimizer", "sgd"]
    steady = pool.run(2, train, flags)[0]
    growing = pool.run(2, train, [*flags, "--loss-scale-window", "2"])[0]
    assert growing.scales[-1] > growing.scales[0]
    np.testing.assert_allclose(growing.losses, steady.losses, rtol=1e-4)
    np.testing.assert_allclose(growing.norms, steady.norms, rtol=1e-3)
    own = pool.run(2, train_as_deepspeed_scales, [*flags, "--loss-scale-window", "2"])[0]
    assert max(abs(a / b - 1) for a, b in zip(own.losses, steady.losses, strict=True)) > 1e-4


def train_as_deepspeed_scales(argv):
    """Trains with DeepSpeed's own growth of the loss scale; for the pool."""
    with mock.patch.object(train_engine, "defer_scale_growth", lambda wrapper: lambda: None):
        return train(argv)


@pytest.mark.parametrize("stage", sampled([0, 1], lambda stage: stage == 1))
def test_overflow_skips_and_halves(pool, stage):
    flags = [
        *FLAGS,
        str(stage),
        "--fp16",
        "--initial-loss-scale",
        str(2.0**32),
        "--hysteresis",
        "1",
    ]
    record = pool.run(1, train, flags)[0]
    assert record.skipped[0]
    assert record.norms[0] == np.inf
    assert record.scales[1] == record.scales[0] / 2
    assert len(record.losses) == 6, "skipped steps are part of training"


NOT_FINITE = ["--lr", "1e30", "--clip-grad", "0", "--optimizer", "sgd", "--lr-decay-style"]


def stops(argv):
    """The message with which training stops; for the pool."""
    with pytest.raises(ValueError) as caught:
        train(argv)
    return str(caught.value)


@pytest.mark.parametrize("stage", sampled([0, 1, 3], lambda stage: stage != 0))
def test_nan_stops_with_step_and_samples(pool, stage):
    message = pool.run(2, stops, [*FLAGS, str(stage), *NOT_FINITE, "constant"])[0]
    assert "at iteration 2, samples 4 to 7" in message
    assert "--no-check-for-nan-in-loss-and-grad" in message


def test_nan_is_counted_when_told_to(pool):
    flags = [*FLAGS, "1", *NOT_FINITE, "constant", "--no-check-for-nan-in-loss-and-grad"]
    record = pool.run(1, train, flags)[0]
    assert record.skipped == [False, *[True] * 5]
