"""Steps of bins (``dynamic_batching``): every division of a step trains as one micro batch of all
its samples does, rates follow the samples, and a restart repeats nothing."""

import json

import numpy as np
import pytest
from family_models import COMMON, NO_DROPOUT
from pool import RankError
from training_jobs import TINY

from megatron.apps.parity.runs import RunRecord, watched_trainer
from megatron.engine.environment import distributed
from megatron.features.curriculum.packing.data import PackedSamples
from megatron.run.run import parse_run

STEPS, BINS = 4, 4
SECTION = {"enabled": True, "max_tokens": 40, "sequence_picking_order": "random"}
BERT = [
    *("--model-family", "bert", "--num-layers", "2", *COMMON, *NO_DROPOUT),
    *f"--train-iters {STEPS} --global-batch-size {BINS} --lr 1e-3".split(),
    *"--lr-warmup-iters 2 --lr-decay-style constant".split(),
]


def packed(argv, **keys):
    sampling = {"enabled": True, "dynamic_batching": SECTION | keys}
    section = {"enabled": True, "data_sampling": sampling}
    return [*argv, "--data-efficiency", json.dumps(section)]


def micro(size):
    return ["--micro-batch-size", str(size)]


def train_bins(argv):
    """The record of a run, and for each step the samples in its bins, its rate and the consumed
    tokens; for the pool."""
    run, record, steps = parse_run(None, argv), RunRecord(), []

    def watch(result):
        record.add(result)
        rate = trainer.engine.optimizer.param_groups[0]["lr"]
        tokens = trainer.plan.lengths.tokens(trainer.consumed_samples)
        steps.append((rate, trainer.plan.rate_factor, tokens))

    with distributed(run.config.parallel) as mesh:
        trainer = watched_trainer(run, mesh, watch)
        trainer.fit()
        bins = trainer.data.datasets.train
        while not isinstance(bins, PackedSamples):
            bins = bins.dataset
        sizes = [
            [len(bins[n % len(bins)].samples) for n in range(s * BINS, (s + 1) * BINS)]
            for s in range(STEPS)
        ]
    return record, steps, sizes


@pytest.fixture(scope="module")
def whole(pool):
    """One micro batch of all samples of a step: its losses are means over tokens by definition."""
    return pool.run(1, train_bins, [*packed(BERT), *micro(BINS)])[0]


DIVISIONS = {
    "bins": (1, micro(1)),
    "dp2-zero1": (2, [*micro(1), "--zero-stage", "1"]),
    "dp2-zero3": (2, [*micro(2), "--zero-stage", "3"]),
    "tp2-sp": (2, [*micro(2), *"--tensor-model-parallel-size 2 --sequence-parallel".split()]),
}


@pytest.mark.parametrize(
    "name",
    [n if n == "dp2-zero1" else pytest.param(n, marks=pytest.mark.proof) for n in DIVISIONS],
)
def test_every_division_of_a_step_is_the_same_training(pool, whole, name):
    size, flags = DIVISIONS[name]
    record, steps, sizes = pool.run(size, train_bins, [*packed(BERT), *flags])[0]
    assert sizes == whole[2] and len({n for step in sizes for n in step}) > 1
    np.testing.assert_allclose(record.losses, whole[0].losses, rtol=2e-6)
    assert steps == whole[1]


def test_rates_follow_the_samples(whole):
    _, steps, sizes = whole
    for number, ((rate, factor, _), of_step) in enumerate(zip(steps, sizes, strict=True)):
        assert factor == sum(of_step) / BINS > 1
        plain = 1e-3 * min(1.0, number / 2)
        assert rate == pytest.approx(factor * plain, rel=1e-12)
    tokens = [after for _, _, after in steps]
    assert 0 < tokens[0] <= 40 * BINS and tokens == sorted(set(tokens))


def test_a_restart_continues_bit_by_bit(pool, whole, tmp_path):
    argv = [*packed(BERT), *micro(BINS), "--save", str(tmp_path)]
    first, before, _ = pool.run(1, train_bins, [*argv, "--exit-interval", "2"])[0]
    second, after, _ = pool.run(1, train_bins, [*argv, "--load", str(tmp_path)])[0]
    assert first.losses + second.losses == whole[0].losses
    assert before + after == whole[1]
    assert second.state.keys() == whole[0].state.keys()
    assert all((second.state[name] == values).all() for name, values in whole[0].state.items())


@pytest.mark.proof
def test_pipelines_have_bins_of_as_many_samples(pool):
    """In a step; its micro batches have one shape."""
    flags = [*packed(BERT), *micro(1), "--pipeline-model-parallel-size", "2"]
    record, _, sizes = pool.run(2, train_bins, flags)[0]
    assert all(len(set(step)) == 1 for step in sizes)
    both, _, _ = pool.run(4, train_bins, [*flags, "--zero-stage", "1"])[0]
    np.testing.assert_allclose(both.losses, record.losses, rtol=2e-6)


@pytest.mark.parametrize("keys", [{}, {"lr_scaling_method": "none"}])
def test_whole_samples_of_a_gpt(pool, keys):
    """Three of 16 tokens in a bin: a step of 4 bins is one of 12 samples, at three times its
    rate."""
    argv = [*TINY, *NO_DROPOUT, "--train-iters", str(STEPS), "--lr", "1e-3"]
    bins = packed(argv, max_tokens=50, sequence_picking_order="dataloader", **keys)
    record, steps, _ = pool.run(1, train_bins, [*bins, *micro(2)])[0]
    rate = "3e-3" if not keys else "1e-3"
    plain = [*argv, "--global-batch-size", "12", "--lr", rate, *micro(6)]
    samples = pool.run(1, train_plainly, plain)[0]
    np.testing.assert_allclose(record.losses, samples.losses, rtol=2e-6)
    assert [tokens for _, _, tokens in steps] == [16 * 12 * (n + 1) for n in range(STEPS)]


def train_plainly(argv):
    run, record = parse_run(None, argv), RunRecord()
    with distributed(run.config.parallel) as mesh:
        watched_trainer(run, mesh, record.add).fit()
    return record


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train-tokens", "1000"], "lengths and rates of this run are in tokens"),
        (["--model-family", "t5", *"--decoder-seq-length 8 --encoder-seq-length 16".split()],
         "this is --model-family t5"),
    ],
)  # fmt: skip
def test_contradictions_are_named(pool, flags, message):
    with pytest.raises(RankError, match=message):
        pool.run(1, train_bins, [*packed(BERT), *flags])
