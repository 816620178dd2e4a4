"""Interval arithmetic on a clock set by hand, and the texts that people's scripts look for."""

from __future__ import annotations

import math
import re

import pytest
import torch

from megatron.data.samples import SequenceLengths
from megatron.engine.train_engine import StepResult
from megatron.training.intervals import IntervalMeter, memory_use
from megatron.training.metrics import Evaluation, perplexity
from megatron.training.trainer import Step

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meter(clock: Clock, peak_flops: float | None = 4e12) -> IntervalMeter:
    return IntervalMeter(100, CPU, 2, peak_flops, clock)


def add(interval: IntervalMeter, loss: float | torch.Tensor = 2.0, **changes) -> None:
    """Adds a step of 1e9 FLOPs a token."""
    values = {"samples": 16, "seq_length": 128, "flops": None, "again": 0.0, "grows": False}
    values |= {"losses": {"lm loss": torch.as_tensor(loss)}, "grad_norm": 1.234, "zeros": None}
    values |= {"skipped": False, "loss_scale": 1.0, "learning_rate": 1.5e-4} | changes
    samples, length = values["samples"], values["seq_length"]
    result = StepResult(
        torch.as_tensor(loss),
        *(values[name] for name in ("losses", "grad_norm", "skipped", "loss_scale")),
        zeros=values["zeros"],
    )
    step = Step(result, 1, 0, samples, length, values["learning_rate"], 0.1)
    flops = samples * length * 1e9 if values["flops"] is None else values["flops"]
    lengths = SequenceLengths(length)
    lengths.grows = values["grows"]
    interval.add(step, flops, values["again"], lengths)


def finish(interval: IntervalMeter):
    return interval.finish(iteration=10, consumed_samples=160, consumed_tokens=20480)


def test_steps_whose_tokens_take_more_each():
    """Longer sequences: 1e9 FLOPs a token, then 3e9, of half as many."""
    clock = Clock()
    interval = meter(clock)
    add(interval, samples=125, seq_length=8, flops=1000 * 1e9, grows=True)
    add(interval, samples=125, seq_length=4, flops=500 * 3e9, grows=True)
    clock.now += 2
    metrics = finish(interval)
    assert metrics.values["tokens_per_second_per_device"] == pytest.approx(1500 / 2 / 2)
    assert metrics.values["tflops_per_device"] == pytest.approx(2500 * 1e9 / 2 / 2 / 1e12)
    assert "curriculum seqlen:     4 |" in metrics.line() and metrics.row()["seq_length"] == 4.0
    add(interval)
    metrics = finish(interval)
    assert "curriculum" not in metrics.line() and "seq_length" not in metrics.row()


def test_norms_and_counts_have_megatrons_places_in_the_line():
    interval = meter(Clock())
    add(interval, seq_length=4, grows=True, loss_scale=16.0, zeros=torch.tensor(7.0))
    interval.record("params_norm", torch.tensor(8.5))
    metrics = finish(interval)
    line = "loss scale: 16.0 | grad norm: 1.234 | num zeros: 7.0 | params norm: 8.500 | "
    assert f" {line}curriculum seqlen:     4 | number of skipped" in metrics.line()
    assert (metrics.row()["num_zeros"], metrics.row()["params_norm"]) == (7.0, 8.5)
    add(interval)
    assert not {"num_zeros", "params_norm"} & finish(interval).row().keys()


def test_rates_against_numbers_by_hand():
    clock = Clock()
    interval = meter(clock)
    for loss in (1.0, 2.0, 6.0, 3.0):
        clock.now += 0.5
        add(interval, loss)
    metrics = finish(interval)
    assert metrics.values["loss"] == 3.0
    assert 4 * metrics.values["seconds_per_iteration"] == pytest.approx(2.0)
    assert metrics.values["samples_per_second"] == pytest.approx(4 * 16 / 2)
    assert metrics.values["tokens_per_second_per_device"] == pytest.approx(4 * 16 * 128 / 2 / 2)
    assert metrics.values["tflops_per_device"] == pytest.approx(2048 * 1e9 / 1e12)
    assert metrics.values["mfu"] == metrics.values["hfu"] == pytest.approx(2.048 / 4)
    assert metrics.row()["seconds_per_iteration"] == pytest.approx(0.5)


def test_recomputed_work_keeps_devices_busy_and_is_not_the_models():
    clock = Clock()
    interval = meter(clock)
    clock.now += 2.0
    add(interval, again=4e12)
    add(interval)
    metrics = finish(interval)
    assert metrics.values["mfu"] == pytest.approx(2 * 2.048e12 / 2 / 2 / 4e12)
    assert metrics.values["hfu"] == pytest.approx(metrics.values["mfu"] + 4e12 / 2 / 2 / 4e12)
    assert metrics.row()["hfu"] == metrics.values["hfu"] and "HFU: 50.6%" in metrics.line()


def test_last_step_counts_for_rates_and_norm():
    interval = meter(Clock())
    add(interval, grad_norm=9.0, learning_rate=1.0, samples=8)
    add(interval, grad_norm=torch.tensor(0.5), learning_rate=2.0, loss_scale=64.0)
    metrics = finish(interval)
    assert (metrics.values["grad_norm"], metrics.values["learning_rate"]) == (0.5, 2.0)
    assert (metrics.values["global_batch_size"], metrics.values["loss_scale"]) == (16, 64.0)


def test_bad_and_skipped_steps_are_counted_and_stay_out_of_the_mean():
    interval = meter(Clock())
    for loss, skipped in ((1.0, False), (math.nan, True), (math.inf, False), (3.0, True)):
        add(interval, loss, skipped=skipped)
    metrics = finish(interval)
    counted = [metrics.values[name] for name in ("loss", "nan_steps", "skipped_steps")]
    assert counted == [2.0, 2, 2]


def test_interval_of_nan_losses_only():
    interval = meter(Clock())
    add(interval, math.nan)
    metrics = finish(interval)
    assert math.isnan(metrics.values["loss"])
    assert "lm loss: NAN |" in metrics.line()


def test_next_interval_starts_where_the_last_ended():
    clock = Clock()
    interval = meter(clock)
    clock.now += 3
    add(interval, 1.0)
    assert finish(interval).values["seconds_per_iteration"] == pytest.approx(3)
    clock.now += 1
    add(interval, 5.0)
    second = finish(interval)
    assert second.values["loss"] == 5.0
    assert second.values["seconds_per_iteration"] == pytest.approx(1)


def test_pauses_do_not_count():
    clock = Clock()
    interval = meter(clock)
    clock.now += 1
    with interval.paused():
        clock.now += 50
    clock.now += 1
    add(interval)
    assert finish(interval).values["seconds_per_iteration"] == pytest.approx(2)


def test_steps_are_added_without_reading_the_device():
    """A meta tensor has no value to read: adding it works, ending the interval cannot."""
    interval = meter(Clock())
    add(interval, torch.empty((), device="meta"), grad_norm=torch.empty((), device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError)):
        finish(interval)


def test_losses_keep_no_graph_and_may_be_half_precision():
    interval = meter(Clock())
    add(interval, torch.tensor([2.5], dtype=torch.bfloat16, requires_grad=True) * 2)
    assert finish(interval).values["loss"] == 5.0


def test_a_terminals_line_is_short_with_the_same_names():
    clock = Clock()
    interval = meter(clock)
    clock.now += 0.1234
    add(interval, 10.0)
    metrics = finish(interval)
    rate = metrics.values["tokens_per_second_per_device"]
    assert metrics.short_line() == (
        "iteration       10/     100 | lm loss: 1.000000E+01 | learning rate: 1.500E-04 | "
        "consumed samples: 160 | grad norm: 1.234 | elapsed time per iteration (ms): 123.4 | "
        f"tokens per second: {2 * rate:,.0f} | MFU: 207.5% |"
    )
    names = {field.partition(":")[0] for field in metrics.short_line().split(" | ")[1:6]}
    assert names <= {field.partition(":")[0] for field in metrics.line().split(" | ")}
    metrics.values.update(skipped_steps=2, seconds_left=3661.0)
    assert "number of skipped iterations: 2 |" in metrics.short_line()
    assert metrics.short_line().endswith("time left: 1:01:01 |")


def test_line_has_megatrons_key_texts():
    clock = Clock()
    interval = meter(clock)
    clock.now += 0.1234
    add(interval, 10.0)
    line = finish(interval).line()
    assert line.startswith(
        " iteration       10/     100 | consumed samples:          160 | "
        "consumed tokens:        20480 | elapsed time per iteration (ms): 123.4 | "
        "learning rate: 1.500E-04 | global batch size:    16 | lm loss: 1.000000E+01 | "
        "loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | samples per second: 129.660 | "
        "tokens per second per device: 8298.2 | TFLOP/s per device: 8.298 | MFU: 207.5% | "
        "HFU: 207.5% | memory"
    )
    assert line.endswith(" |")
    # As users' scripts take it apart.
    assert re.search(r"iteration\s+(\d+)/\s*(\d+)", line).groups() == ("10", "100")
    assert float(re.search(r"lm loss: ([\d.E+-]+)", line)[1]) == 10.0


def test_unknown_values_are_left_out_of_the_line_and_null_in_the_row():
    interval = meter(Clock(), peak_flops=None)
    add(interval, grad_norm=None)
    metrics = finish(interval)
    assert "MFU" not in metrics.line() and "HFU" not in metrics.line()
    assert "grad norm" not in metrics.line()
    assert (metrics.row()["mfu"], metrics.row()["grad_norm"]) == (None, None)


def test_evaluation_line():
    metrics = Evaluation(10, {"lm loss": math.log(50)})
    assert metrics.line() == (
        " validation loss at iteration 10 | lm loss value: 3.912023E+00 | "
        "lm loss PPL: 5.000000E+01 |"
    )
    assert "iteration 10 on test set |" in Evaluation(10, {"lm loss": 1.0}, test=True).line()


@pytest.mark.parametrize(
    "loss, expected", [(1.0, math.e), (21.0, math.exp(20)), (math.inf, math.exp(20))]
)
def test_perplexity_does_not_overflow(loss, expected):
    assert perplexity(loss) == pytest.approx(expected)


def test_perplexity_of_nan_is_nan():
    assert math.isnan(perplexity(math.nan))


def test_several_losses_are_reported_by_their_names():
    """BERT's: each mean is of the steps in which that loss is finite."""
    interval = meter(Clock())
    for lm, sop in ((3.0, 1.0), (5.0, math.nan)):
        losses = {"lm loss": torch.tensor(lm), "sop loss": torch.tensor(sop)}
        add(interval, lm + sop, losses=losses)
    metrics = finish(interval)
    assert "| lm loss: 4.000000E+00 | sop loss: 1.000000E+00 |" in metrics.line()
    assert metrics.values["nan_steps"] == 1
    row = metrics.row()
    assert (row["loss"], row["lm loss"], row["sop loss"]) == (4.0, 4.0, 1.0)
    evaluation = Evaluation(3, {"lm loss": 0.0, "sop loss": 1.0})
    assert evaluation.line() == (
        " validation loss at iteration 3 | lm loss value: 0.000000E+00 | lm loss PPL: "
        "1.000000E+00 | sop loss value: 1.000000E+00 | sop loss PPL: 2.718282E+00 |"
    )
    assert evaluation.row()["sop loss PPL"] == pytest.approx(math.e)


def test_numbers_without_a_perplexity():
    """Those of preferences: a reward's exponential says nothing."""
    numbers = {"dpo loss": 0.5, "lm loss": 0.0, "rewards/margins": 2.0}
    evaluation = Evaluation(
        3, numbers, no_perplexity=frozenset({"dpo loss", "rewards/margins"}), loss=0.75
    )
    assert evaluation.line() == (
        " validation loss at iteration 3 | dpo loss value: 5.000000E-01 | lm loss value: "
        "0.000000E+00 | lm loss PPL: 1.000000E+00 | rewards/margins value: 2.000000E+00 |"
    )
    assert evaluation.row() == {**numbers, "loss": 0.75, "lm loss PPL": 1.0}
    alone = Evaluation(3, {"kto loss": 0.5}, no_perplexity=frozenset({"kto loss"}))
    assert alone.row() == {"loss": 0.5} and "PPL" not in alone.line()


def test_memory_on_cpu_is_the_peak_resident_set_in_bytes():
    psutil = pytest.importorskip("psutil")
    use = memory_use(CPU)
    assert use.reserved is None
    # At least about what is resident now, at most twice: the unit is right.
    assert 0.9 * psutil.Process().memory_info().rss < use.allocated < 64 * 2**30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_on_cuda_is_the_allocators_peak():
    device = torch.device("cuda", 0)
    kept = torch.empty(2**24, dtype=torch.uint8, device=device)
    use = memory_use(device)
    assert kept.numel() <= use.allocated <= use.reserved


def test_own_times_of_ranks_are_at_the_end_of_the_line():
    interval = meter(Clock())
    add(interval)
    metrics = finish(interval)
    assert "slowest_rank" not in metrics.row()
    metrics.values.update(slowest_rank=3, own_seconds_slowest=0.4)
    metrics.values.update(own_seconds_median=0.3, own_seconds_fastest=0.2)
    assert metrics.line().endswith("| slowest rank: 3 | own time of ranks (ms): 200.0 to 400.0 |")
    row = metrics.row()
    assert (row["slowest_rank"], row["own_seconds_slowest"]) == (3, 0.4)
    assert (row["own_seconds_median"], row["own_seconds_fastest"]) == (0.3, 0.2)


def test_a_number_that_is_only_recorded_has_a_text_and_a_name():
    interval = meter(Clock())
    for seconds in (1.0, 2.0):
        add(interval)
        interval.record("queue_seconds", torch.tensor(seconds), "mean", "s")
    metrics = finish(interval)
    assert metrics.line().endswith(" | queue seconds (s): 1.5 |")
    assert list(metrics.row().items())[-1] == ("queue_seconds", 1.5)
