"""Batch ramp-up against the step-by-step definition, and its messages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.config.flags import ConfigError
from megatron.features.batch_growth.schedule import RampUp
from megatron.training.schedules import BatchSizeSchedule


def rampup(start, increment, samples, full, micro_batch_size, data_parallel_size):
    ramp = (start, increment, samples)
    return RampUp(full, micro_batch_size, data_parallel_size, ramp)


def steps(schedule):
    """(consumed samples before the step, its batch size), without end."""
    consumed = 0
    while True:
        yield consumed, schedule.batch_size(consumed)
        consumed += schedule.batch_size(consumed)


def test_ramp_against_numbers_by_hand():
    # (32 - 8) / 8 = 3 parts of 100 samples each.
    ramp = rampup(8, 8, 300, 32, micro_batch_size=2, data_parallel_size=2)
    sizes = {0: 8, 99: 8, 100: 16, 199: 16, 200: 24, 299: 24, 300: 32, 301: 32, 10**9: 32}
    assert {n: ramp.batch_size(n) for n in sizes} == sizes
    assert [ramp.micro_batches(n) for n in (0, 100, 200, 300)] == [2, 4, 6, 8]
    # 13 batches of 8 reach 104; 6 of 16 reach 200; 5 of 24 reach 320.
    assert [size for _, size in itertools.islice(steps(ramp), 26)] == (
        [8] * 13 + [16] * 6 + [24] * 5 + [32] * 2
    )
    assert ramp.samples(24) == 320
    assert ramp.iterations(320 + 63) == 25


def megatron_batch_size(start, increment, ramp_samples, full, consumed):
    """The definition in one expression, of Megatron's microbatches.py."""
    if consumed > ramp_samples:
        return full
    per_increment = ramp_samples / ((full - start) // increment)
    return start + int(consumed / per_increment) * increment


@pytest.mark.parametrize(
    "increments, ramp_samples, consumed, exact, rounded", [(7, 9, 9, 7, 6), (14, 18, 9, 7, 6)]
)
def test_rounding_against_megatron(increments, ramp_samples, consumed, exact, rounded):
    """Where the division of the definition rounds down to the increment before."""
    assert consumed * increments // ramp_samples == exact
    ramp = rampup(1, 1, ramp_samples, 1 + increments, 1, 1)
    assert ramp.batch_size(consumed) == 1 + rounded
    assert ramp.batch_size(consumed + 1) > 1 + rounded


ramps = st.builds(
    lambda start, inc, n, samples, step: rampup(
        start * step, inc * step, samples, (start + inc * n) * step, step, 1
    ),
    start=st.integers(1, 6),
    inc=st.integers(1, 5),
    n=st.integers(0, 12),
    samples=st.integers(0, 3000),
    step=st.integers(1, 3),
)


@given(ramp=ramps, consumed=st.integers(0, 3500))
def test_against_megatron_definition(ramp, consumed):
    # Megatron divides by zero without an increment or without ramp samples.
    start, increment, samples = ramp.rampup
    assume(start < ramp.global_batch_size and samples > 0)
    assert ramp.batch_size(consumed) == megatron_batch_size(
        start, increment, samples, ramp.global_batch_size, consumed
    )


@given(ramp=ramps, iterations=st.integers(0, 300), extra=st.integers(0, 100))
def test_iterations_and_samples_against_stepping(ramp, iterations, extra):
    consumed, size = next(itertools.islice(steps(ramp), iterations, None))
    assert ramp.samples(iterations) == consumed
    assert ramp.iterations(consumed + min(extra, size - 1)) == iterations


@given(ramp=ramps, first=st.integers(0, 3500), second=st.integers(0, 3500))
def test_batch_never_shrinks_nor_passes_its_full_size(ramp, first, second):
    low, high = sorted((first, second))
    assert ramp.rampup[0] <= ramp.batch_size(low) <= ramp.batch_size(high) <= ramp.global_batch_size


def test_ramp_without_growth_or_samples_is_constant():
    for ramp in (rampup(16, 4, 100, 16, 4, 1), rampup(4, 4, 0, 16, 4, 1)):
        assert [ramp.batch_size(n) for n in (0, 1, 1000)] == [16, 16, 16]
        assert ramp.iterations(100) == 6
        assert ramp.samples(7) == 112


def test_constant():
    constant = BatchSizeSchedule(16, 2, 4)
    assert constant.batch_size(12345) == 16
    assert constant.micro_batches(0) == 2
    assert constant.iterations(47) == 2
    assert constant.samples(3) == 48


@pytest.mark.parametrize(
    "rampup, full, words",
    [
        (None, 18, ("--global-batch-size 18", "--micro-batch-size 2", "size 2 = 4", "16 or 20")),
        (None, 3, ("--global-batch-size 3", "nearest: 4")),
        (None, 0, ("--global-batch-size 0", "nearest: 4")),
        ((6, 4, 100), 16, ("START 6", "= 4", "nearest: 4 or 8")),
        ((4, 6, 100), 16, ("INCREMENT 6", "nearest: 4 or 8")),
        (
            (4, 8, 100),
            24,
            ("steps of 8 do", "from 4 to --global-batch-size 24", "20 or 28", "4 or 20"),
        ),
        ((32, 4, 100), 16, ("START 32", "--global-batch-size 16")),
        ((0, 4, 100), 16, ("--rampup-batch-size 0 4 100", "more than 0")),
        ((4, 0, 100), 16, ("--rampup-batch-size 4 0 100", "more than 0")),
        ((4, 4, -1), 16, ("--rampup-batch-size 4 4 -1", "at least 0")),
    ],
)
def test_errors_name_flags_values_and_what_is_near(rampup, full, words):
    with pytest.raises(ConfigError) as error:
        if rampup is None:
            BatchSizeSchedule(full, 2, 2)
        else:
            RampUp(full, 2, 2, rampup)
    for word in words:
        assert word in str(error.value)


def test_micro_batch_size_of_zero_is_an_error():
    with pytest.raises(ConfigError, match="--micro-batch-size 0"):
        BatchSizeSchedule(4, 0, 1)


@given(
    start=st.integers(1, 30),
    increment=st.integers(1, 30),
    full=st.integers(1, 60),
    micro=st.integers(1, 4),
)
def test_what_the_messages_offer_is_accepted(start, increment, full, micro):
    """Follow the first piece of advice of each message: a valid ramp is a few changes away."""
    values = {"START": start, "INCREMENT": increment, "--global-batch-size": full}
    for _ in range(5):
        try:
            rampup(
                values["START"], values["INCREMENT"], 100, values["--global-batch-size"], micro, 1
            )
            return
        except ConfigError as error:
            text = str(error)
        if "must be at most" in text:
            values["--global-batch-size"] = values["START"]
        elif "do not lead" in text:
            values["INCREMENT"] = int(text.split()[-1])
        else:
            name = next(n for n in ("START ", "INCREMENT ", "--global-batch-size") if n in text)
            values[name.strip()] = int(text.split()[-1])
    pytest.fail(f"five pieces of advice did not help: {values}")
