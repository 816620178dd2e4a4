"""When the trainer learns what the device found out."""

import pytest
import torch

from megatron.engine.train_engine import StepResult
from megatron.training.guard import NonFiniteGuard, TrainingStopped
from megatron.training.lagged import LaggedReads
from megatron.training.signals import StopAgreement
from megatron.training.trainer import Step

CPU = torch.device("cpu")


def result(held: float | bool = 0.0, loss: float = 1.0) -> StepResult:
    flag = held if isinstance(held, bool) else torch.tensor(held)
    total = torch.tensor(loss, dtype=torch.float64)
    return StepResult(total, {"lm loss": total}, torch.tensor(2.0), flag, 1.0)


class Guard(NonFiniteGuard):
    """Needs no trainer."""

    def add(self, result: StepResult, iteration: int, first_sample: int, samples: int) -> None:
        step = Step(result, iteration, first_sample, samples, 16, 1e-3, 0.1)
        self.after_step(None, step)  # type: ignore[arg-type]

    def look(self) -> None:
        self.settle(None)  # type: ignore[arg-type]


def watch(lag: int = 0, fp16: bool = False, check: bool = True) -> Guard:
    found = Guard(CPU, fp16, check)
    found._reads = LaggedReads(lag)
    return found


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_values_come_back_in_order_after_the_lag(lag):
    reads = LaggedReads(lag)
    seen = []
    for number in range(5):
        reads.add(number, torch.tensor([float(number)]))
        seen += reads.due()
    assert seen == [(n, [float(n)]) for n in range(5 - lag)]
    seen += reads.due(all_of_them=True)
    assert seen == [(n, [float(n)]) for n in range(5)]


def test_bad_step_is_named_late():
    steps = watch(lag=2)
    for number, held in enumerate((0.0, 1.0, 1.0), start=1):
        steps.add(result(held), number, 8 * (number - 1), 8)
    with pytest.raises(TrainingStopped, match="not finite at iteration 2, samples 8 to 15"):
        steps.add(result(1.0), 4, 24, 8)


def test_looking_at_all_waits_for_no_further_step():
    steps = watch(lag=2)
    steps.add(result(1.0, float("nan")), 1, 0, 8)
    steps.add(result(), 2, 8, 8)
    with pytest.raises(TrainingStopped, match="the loss is nan at iteration 1, samples 0 to 7"):
        steps.look()


def test_large_loss_is_not_infinite():
    with pytest.raises(TrainingStopped, match="the gradients are not finite"):
        watch().add(result(1.0, 1e300), 1, 0, 8)


def test_what_the_host_knows_is_judged_at_once():
    steps = watch(lag=2, fp16=True)
    steps.add(result(False, float("nan")), 1, 0, 8)
    steps.add(result(True), 2, 8, 8)  # an overflow of the scale
    with pytest.raises(TrainingStopped, match="iteration 3"):
        steps.add(result(True, float("inf")), 3, 16, 8)


def test_unchecked_steps_may_be_bad():
    steps = watch(check=False)
    steps.add(result(1.0, float("nan")), 1, 0, 8)
    steps.look()


def test_alone_one_stops_when_one_asks():
    alone = StopAgreement(CPU, 1)
    assert not alone.reached(False, False)
    assert alone.reached(True, False)
