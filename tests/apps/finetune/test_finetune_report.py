"""The report of a fine-tuning, and the flags that its messages name."""

from types import SimpleNamespace

import pytest

from megatron.apps.finetune.report import curves_of, labels, ticks
from megatron.apps.finetune.settings import errors_in_own_flags
from megatron.apps.finetune.summary import numbers


@pytest.mark.parametrize(
    "row, names",
    [
        ({"loss": 2.0, "grad_norm": 1.0}, {"lm loss", "grad_norm"}),  # a step with one loss
        ({"lm loss": 2.0, "lm loss PPL": 7.4}, {"lm loss"}),
        ({"loss": 0.5, "kto loss": 0.5}, {"kto loss"}),
        ({"loss": 3.0, "lm loss": 2.0, "kd loss": 1.0, "total loss": 3.0},
         {"lm loss", "kd loss", "total loss"}),
        ({"loss": 3.0, "dpo loss": 2.0}, {"loss", "dpo loss"}),
    ],
)  # fmt: skip
def test_a_loss_has_one_name_in_training_and_evaluation(row, names):
    assert set(numbers({"kind": "train", "iteration": 3} | row)) == names


def test_the_loss_is_the_first_curve_and_the_runs_course_is_none():
    """Every value of a log line and an evaluation: losses and what else the training learns."""
    step = {"grad_norm": 1.0, "learning_rate": 1e-5, "rewards/margins": 0.5}
    course = dict.fromkeys(
        (
            *("slowest_rank", "own_seconds_slowest", "own_seconds_median", "own_seconds_fastest"),
            *("seconds_left", "tokens_per_second_per_device", "trained_tokens_per_second"),
            *("energy_joules", "devices_joules", "device_seconds", "cost", "cost_left", "mfu"),
        ),
        1.0,
    )
    rows = [
        {"kind": "train", "iteration": n, **course, **step, "loss": 3.0 - n} for n in range(1, 3)
    ]
    rows.append({"kind": "validation", "iteration": 2, "loss": 1.5, "perplexity": 4.5})
    curves = curves_of(SimpleNamespace(rows=rows))
    assert list(curves)[0] == "lm loss" and set(curves) == {"lm loss", *step}
    assert curves["lm loss"]["training"] == ([1.0, 2.0], [2.0, 1.0])
    assert curves["lm loss"]["held out"] == ([2.0], [1.5])


def test_labels_of_an_axis_are_all_different():
    marks = ticks(10.83409, 10.83435)
    assert len(set(labels(marks))) == len(marks) > 2
    assert labels([0.5, 1.0, 1e-05]) == ["0.5", "1", "1e-05"]


@pytest.mark.parametrize(
    "error, message, shown",
    [
        (FileNotFoundError, "--data-path a: no --data-paths", "--data a: no --data-paths"),
        (ValueError, "--pretrained-checkpoint m: a", "--model m: a"),
        (ValueError, "a larger share in --split, or", "a larger share in --held-out, or"),
    ],
)
def test_messages_name_the_flags_of_this_command(error, message, shown):
    with pytest.raises(error) as raised, errors_in_own_flags():
        raise error(message)
    assert str(raised.value) == shown
