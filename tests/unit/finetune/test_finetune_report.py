"""The report of a fine-tuning, and the flags that its messages name."""

import pytest

from megatron.finetune.own_flags import errors_in_own_flags
from megatron.finetune.report import labels, ticks
from megatron.finetune.summary import numbers


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
