"""fp16 at ZeRO stage 0: the numbers of ZeRO 1, and the loss scale of DeepSpeed's own engine."""

import json
import re
from unittest import mock

import numpy as np
import pytest
import torch
from samples import sampled
from torch import nn
from training_jobs import TINY, run, train

from megatron.apps.parity import runs
from megatron.engine import train_engine
from megatron.engine.environment import prepare_deepspeed

FLAGS = [*TINY, "--fp16", "--initial-loss-scale", "4096"]
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
TP = ["--tensor-model-parallel-size", "2"]
PP = ["--num-layers", "4", "--pipeline-model-parallel-size", "2"]
SUMS = ["--accumulate-allreduce-grads-in-fp32"]
PRESCALED = {"prescale_gradients": True}
NOT_CLIPPED = ["--clip-grad", "0"]
"""At ZeRO 1 several ranks add the squares of their partitions, so that the norm rounds otherwise,
and clipping spreads that."""
SAME = {
    "accumulated": (1, []),
    "not clipped": (1, NOT_CLIPPED),
    "static scale": (1, ["--loss-scale", "1000"]),
    "sums in fp32": (1, SUMS),
    "sgd": (1, ["--optimizer", "sgd", "--sgd-momentum", "0.9"]),
    "two rates": (1, ["--lr-group", "*mlp*=0.5"]),
    "compiled": (1, ["--torch-compile", "on"]),
    "lora": (1, ["--lora", "--lora-rank", "4"]),
    "dp2, prescaled": (2, NOT_CLIPPED),
    "dp2, sums in fp32": (2, [*SUMS, *NOT_CLIPPED]),
    "tp2": (2, TP),
    "tp2-sp": (2, [*TP, "--sequence-parallel", *NO_DROPOUT]),
    "tp2-dp2, shared keys, prescaled": (4, [*TP, "--num-query-groups", "1", *NOT_CLIPPED]),
    "pp2": (2, PP),
    "pp2-dp2, prescaled": (4, [*PP, *NOT_CLIPPED]),
    "pp2-interleaved": (2, [*PP, "--num-layers-per-virtual-pipeline-stage", "1"]),
    "pp2-dualpipev": (2, [*PP, "--pipeline-schedule", "dualpipev"]),
    "tp2-sp-pp2": (4, [*TP, "--sequence-parallel", *NO_DROPOUT, *PP]),
}


@pytest.mark.parametrize("name", sampled(SAME, {"accumulated", "pp2"}.__contains__))
def test_against_zero_1(pool, tmp_path, name):
    """Bit for bit: both add the same numbers in the same order, with two ranks if a JSON says that
    gradients are divided by their number first, as ZeRO 1 does without it."""
    size, flags = SAME[name]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PRESCALED if "prescaled" in name else {}))
    flags = [*FLAGS, *flags, "--train-iters", "5", "--deepspeed_config", str(path), "--zero-stage"]
    partitioned, whole = (pool.run(size, train, [*flags, stage])[0] for stage in ("1", "0"))
    assert whole.losses == partitioned.losses
    rounding = 3e-7 if "dp2" in name else 0.0
    assert whole.norms == pytest.approx(partitioned.norms, rel=rounding, abs=0.0)
    assert min(whole.norms) > 0.1, "norms are those of gradients without scale"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("size", "flags"),
    [(2, []), (4, []), (4, SUMS), (4, [*PP]), (4, [*TP, *SUMS]), (4, [*PP, *SUMS])],
)
def test_other_orders_of_sums(pool, size, flags):
    """ZeRO 1 divides by the number of ranks before it adds; stage 0 does so after, and adds four
    ranks in another order. Sums in float16 round to 11 bits; both stages are then as far from a
    run in float32 as from each other."""
    flags = [*FLAGS, *flags, "--train-iters", "5", "--zero-stage"]
    partitioned, whole = (pool.run(size, train, [*flags, stage])[0] for stage in ("1", "0"))
    rounding = 1 if SUMS[0] in flags else 10
    np.testing.assert_allclose(whole.losses, partitioned.losses, rtol=3e-5 * rounding)
    np.testing.assert_allclose(whole.norms, partitioned.norms, rtol=3e-4 * rounding)
    assert whole.losses[0] == partitioned.losses[0]


@pytest.mark.parametrize("more", sampled(["", *SUMS], lambda more: not more))
def test_a_growing_scale_changes_nothing(pool, more):
    flags = [*FLAGS, "--train-iters", "6", "--zero-stage", "0", "--optimizer", "sgd", *more.split()]
    steady, growing = (
        pool.run(1, train, [*flags, "--loss-scale-window", window])[0] for window in ("9", "2")
    )
    assert growing.scales[-1] > growing.scales[0] == steady.scales[-1]
    np.testing.assert_allclose(growing.losses, steady.losses, rtol=1e-5)
    np.testing.assert_allclose(growing.norms, steady.norms, rtol=1e-4)


def planted(param, bad):
    """Makes the gradient of a parameter infinite in some of its backward passes, counted from 0."""
    count = iter(range(99))

    def plant(grad):
        if grad is None:  # autograd has none of a weight whose gradients are added elsewhere
            return None
        return grad * float("inf") if next(count) in bad else grad

    param.register_hook(plant)


def train_with_overflows(argv, bad):
    """The record of a run whose steps ``bad`` overflow, and what it printed; for the pool."""
    start, records = train_engine.TrainEngine.__init__, []

    def build(engine, *args, **options):
        start(engine, *args, **options)
        planted(next(iter(engine.trained)), bad)

    with (
        mock.patch.object(train_engine.TrainEngine, "__init__", build),
        mock.patch.object(runs, "train", lambda argv, of=runs.train: records.append(of(argv))),
    ):
        output, error = run(argv)
    assert error is None
    return records[0], output


def stock_scales(fp16, bad, steps):
    """The scale of each step in stock DeepSpeed at ZeRO 1, and the skipped ones; for the pool."""
    prepare_deepspeed()
    import deepspeed

    from megatron.engine.deepspeed_patches import allow_fp16

    allow_fp16()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = nn.Linear(4, 4)
    settings = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, **fp16},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    planted(model.weight, bad)
    scales, skipped = [], []
    for _ in range(steps):
        scales.append(float(engine.optimizer.loss_scale))
        engine.backward(engine(torch.ones(1, 4).half()).sum())
        engine.step()
        skipped.append(bool(engine.optimizer.overflow))
    engine.destroy()
    return scales, skipped


OVERFLOWS = [
    # hysteresis, window, smallest scale, initial power, steps with overflow
    (1, 2, 1, 6, {0, 5, 6}),
    (2, 3, 1, 6, {1, 2, 3, 8, 9}),
    (3, 2, 1, 6, {0, 1, 2, 6, 7, 9}),
    (2, 500, 24, 6, {0, 2, 3}),
]


@pytest.mark.parametrize(
    ("hysteresis", "window", "least", "power", "bad"),
    sampled(OVERFLOWS, lambda case: case[0] == 2 and case[1] == 3),
)
def test_scale_of_each_step_against_stock_deepspeed(pool, hysteresis, window, least, power, bad):
    steps = 14
    fp16 = {
        "initial_scale_power": power,
        "loss_scale_window": window,
        "hysteresis": hysteresis,
        "min_loss_scale": least,
    }
    scales, skipped = pool.run(1, stock_scales, fp16, bad, steps)[0]
    flags = [*TINY, "--fp16", "--zero-stage", "0", "--global-batch-size", "1", "--log-interval"]
    flags += ["1", "--train-iters", str(steps), "--initial-loss-scale", str(2.0**power)]
    flags += ["--loss-scale-window", str(window), "--hysteresis", str(hysteresis)]
    flags += ["--min-loss-scale", str(least)]
    record, output = pool.run(1, train_with_overflows, flags, bad)[0]
    assert record.scales == scales
    assert record.skipped == skipped == [step in bad for step in range(steps)]
    assert np.isinf(record.norms).tolist() == skipped
    lines = re.findall(r"loss scale: ([\d.]+) .* number of skipped iterations: +(\d+)", output)
    assert [float(scale) for scale, _ in lines] == scales
    assert [int(count) for _, count in lines] == skipped
