"""A cooldown branches off from any checkpoint of any schedule."""

import numpy as np
import pytest

from megatron.apps.parity.runs import train, watched_trainer
from megatron.config import ConfigError
from megatron.engine.environment import distributed
from megatron.run.run import parse_run
from megatron.training.plan import TrainingPlan

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-2 --train-iters 12 --tokenizer-type NullTokenizer --vocab-size "
    "30 --mock-data --num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 100"
).split()


def rates(argv, steps):
    plan = TrainingPlan(parse_run(None, argv).config)
    return [plan.rates(step, 2 * step) for step in steps], plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A cosine with a warm-up and rates of its own for embeddings, stopped after 6 of 12 steps."""
    folder = tmp_path_factory.mktemp("run")
    flags = "--lr-decay-style cosine --lr-warmup-iters 2 --decoupled-lr 3e-2 --min-lr 1e-3".split()
    argv = [*FLAGS, *flags]
    train([*argv, "--save", str(folder), "--exit-interval", "6"])
    return argv, folder


def test_the_rate_falls_from_where_it_is(saved):
    """By 1 - sqrt(r) to --min-lr (Hägele et al. 2024, arXiv:2405.18392), both rates."""
    argv, folder = saved
    (before,), _ = rates(argv, [6])
    branch = [*argv, "--load", str(folder), "--cooldown-iters", "4"]
    actual, plan = rates(branch, range(6, 11))
    assert plan.train_iters == 10
    for number, (rate, decay, decoupled) in enumerate(actual):
        share = 1 - np.sqrt(number / 4)
        assert rate == pytest.approx(1e-3 + share * (before[0] - 1e-3), rel=1e-12)
        assert decoupled == pytest.approx(1e-3 + share * (before[2] - 1e-3), rel=1e-12)
        assert decay == before[1]
    linear, _ = rates([*branch, "--lr-wsd-decay-style", "linear", "--min-lr", "0"], [8])
    assert linear[0][0] == pytest.approx(before[0] / 2, rel=1e-12)


def test_an_interrupted_branch_continues_bitwise(saved, tmp_path):
    argv, folder = saved
    branch = [*argv, "--cooldown-iters", "4"]
    whole = train([*branch, "--load", str(folder)])
    assert whole.iteration == 10 and len(whole.losses) == 4
    train([*branch, "--load", str(folder), "--save", str(tmp_path), "--exit-interval", "8"])
    rest = train([*branch, "--load", str(tmp_path), "--save", str(tmp_path)])
    assert rest.iteration == 10 and rest.losses == whole.losses[2:]


def test_a_run_of_samples_branches_off_after_its_batches(tmp_path):
    """Growing batches: the first step of the branch is the next one of the run, and later ones
    have the batch sizes of the run, whatever units its schedule and its length are in."""
    argv = [*FLAGS, *"--global-batch-size 4 --train-samples 40 --lr-decay-style WSD".split()]
    argv = argv[: (at := argv.index("--train-iters"))] + argv[at + 2 :]
    argv += "--lr-decay-samples 40 --lr-wsd-decay-samples 8 --lr-warmup-samples 8".split()
    argv += "--rampup-batch-size 2 2 16".split()
    whole = train(argv)
    train([*argv, "--save", str(tmp_path), "--exit-interval", "6"])
    branch = [*argv, "--load", str(tmp_path), "--cooldown-iters", "4"]
    config, record = parse_run(None, branch).config, train(branch)
    assert config.training.train_samples is None and config.training.train_iters == 10
    assert record.losses[0] == whole.losses[6] and len(record.losses) == 4
    samples = TrainingPlan(config).batch_size.samples
    assert [samples(step) for step in (6, 10)] == [12, 24]
    plan = TrainingPlan(config)
    expected = [1e-2 * (1 - np.sqrt(n / 4)) for n in range(5)]
    assert [plan.rates(6 + n, samples(6 + n))[0] for n in range(5)] == pytest.approx(expected)


def test_passes_over_data_are_a_length_that_is_replaced(saved):
    """--epochs multiplies --train-iters where a run has both."""
    argv, folder = saved
    branch = [*argv, "--load", str(folder), "--cooldown-iters", "4", "--epochs", "3"]
    assert parse_run(None, branch).config.training.train_iters == 10


@pytest.mark.parametrize("flags, message", [
    ("", "--cooldown-iters 4 needs --load with a checkpoint"),
    ("--load {} --finetune", "--cooldown-iters 4 contradicts --finetune"),
    ("--load {} --use-checkpoint-opt_param-scheduler", "contradicts --use-checkpoint-opt_param"),
])  # fmt: skip
def test_a_branch_of_nothing_is_refused(saved, flags, message):
    argv, folder = saved
    with pytest.raises(ConfigError, match=message):
        parse_run(None, [*argv, *flags.format(folder).split(), "--cooldown-iters", "4"])


def test_a_branch_of_a_finished_schedule_is_refused(tmp_path):
    train([*FLAGS, "--train-iters", "1", "--save", str(tmp_path)])
    branch = [*FLAGS, "--load", str(tmp_path), "--cooldown-iters", "4"]
    with pytest.raises(ConfigError, match="rate of .*global_step1 is 0.*--load-tag"):
        parse_run(None, branch)


CHANGES = {
    "--lr 5e-3": (5e-3, 0.01),
    "--weight-decay 0.2": (1e-2, 0.2),
    "--lr-decay-style linear --train-iters 24": (1e-2 * 18 / 24, 0.01),
    "--lr 5e-3 --override-opt_param-scheduler": (5e-3, 0.01),
    "--lr 5e-3 --use-checkpoint-opt_param-scheduler": (1e-2, 0.01),
    "--lr 5e-3 --weight-decay 0.2 --use-checkpoint-opt_param-scheduler": (1e-2, 0.01),
    "--lr-group *.up.*=0.5": (1e-2, 0.01),
    "--lr-decay-style WSD --lr-wsd-decay-iters 12 --lr-wsd-decay-style linear": (5e-3, 0.01),
    "--lr-decay-style WSD --lr-wsd-decay-iters 12 --reset-iteration": (1e-2, 0.01),
}
"""Flags that a resumed run changes, and (rate, decay) of the first step after the checkpoint: step
6 of 12 at a constant rate: the table of docs/guides/optimizers.md."""


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("constant")
    argv = [*FLAGS, "--lr-decay-style", "constant"]
    train([*argv, "--save", str(folder), "--exit-interval", "6"])
    return argv, folder


@pytest.mark.parametrize("flags", [
    name if name.startswith("--lr 5e-3 --use") else pytest.param(
        name, marks=pytest.mark.proof) for name in CHANGES
])  # fmt: skip
def test_rates_that_the_optimizer_has_after_a_changed_resume(constant, flags):
    argv, folder = constant
    run = parse_run(None, [*argv, "--load", str(folder), *flags.split()])
    actual = {}

    def watch(_):
        for group in trainer.engine.optimizer.param_groups:
            rate, decay = group["lr"] / group["lr_factor"], group["weight_decay"]
            actual.setdefault(group["decays"], (rate, decay))

    with distributed(run.config.parallel) as mesh:
        trainer = watched_trainer(run, mesh, watch)
        trainer.fit()
    assert actual[True] == pytest.approx(CHANGES[flags], rel=1e-12)
    assert actual[False] == pytest.approx((CHANGES[flags][0], 0.0), rel=1e-12)
