"""Lengths and positions of a run, from its flags."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.training.plan import TrainingPlan

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --lr 1 "
    "--micro-batch-size 1 --global-batch-size 4 --eval-interval 3 --eval-iters 2 "
)


def plan(flags):
    settings = FlagParser(*FLAG_CLASSES).settings((FLAGS + flags).split())
    return TrainingPlan(resolve(settings, 1).config)


@pytest.mark.parametrize(
    "flags, steps",
    [
        ("--train-iters 5", 5),
        ("--train-samples 11", 2),
        ("--train-tokens 128", 2),
        ("--train-tokens 113", 2),
        ("--train-samples 16 --rampup-batch-size 2 2 8", 6),
    ],
)
def test_steps(flags, steps):
    assert plan(flags).train_iters == steps


@pytest.mark.parametrize("flags", ["--train-samples 3", "--train-tokens 48"])
def test_less_than_a_step_is_refused(flags):
    with pytest.raises(ConfigError, match=f"{flags} is less than one step takes: 4 samples of 16"):
        plan(flags)
    assert plan("--skip-train").train_iters == 0


def test_validation_reads_on_and_stays_within_its_samples():
    course = plan("--train-iters 8")
    _, valid_samples, _ = course.sample_counts
    evaluated = [3, 6, 8]
    starts = [course.valid_samples_before(iteration) for iteration in evaluated]
    assert starts == [0, 8, 16]
    assert starts[-1] + 8 == valid_samples
    assert course.valid_samples_before(10**6) == 16, "a checkpoint past the end of this run"
    assert plan("--skip-train").valid_samples_before(10**6) == 0
