"""The schedules against those of transformers and torch, and against numbers worked by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.flags import ConfigError
from megatron.config.optimizer import OptimizerFlags
from megatron.training.schedules import LearningRateSchedule, WeightDecaySchedule

CHOICES = {
    field.name: field.metadata.get("choices") for field in dataclasses.fields(OptimizerFlags)
}
LR, WARMUP, DECAY, WSD_DECAY = 3e-4, 7, 50, 20


def schedule(style: str, **changes) -> LearningRateSchedule:
    values = {
        "lr": LR,
        "min_lr": 0.0,
        "init_lr": 0.0,
        "warmup": WARMUP,
        "decay": DECAY,
        "wsd_decay": WSD_DECAY if style == "WSD" else None,
    } | changes
    return LearningRateSchedule(style=style, **values)


def rates_of_scheduler(build, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = build(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


TRANSFORMERS = {
    "constant": lambda o: transformers.get_constant_schedule_with_warmup(o, WARMUP),
    "linear": lambda o: transformers.get_linear_schedule_with_warmup(o, WARMUP, DECAY),
    "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, WARMUP, DECAY),
    "inverse-square-root": lambda o: transformers.get_inverse_sqrt_schedule(o, WARMUP),
}


@pytest.mark.parametrize("style", TRANSFORMERS)
def test_against_transformers(style):
    ours = schedule(style)
    theirs = rates_of_scheduler(TRANSFORMERS[style], DECAY + 1)
    assert [ours(step) for step in range(DECAY + 1)] == pytest.approx(theirs, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("wsd_style", ["linear", "cosine", "minus_sqrt"])
def test_against_transformers_wsd(wsd_style):
    ours = schedule("WSD", wsd_style=wsd_style, min_lr=0.1 * LR)
    theirs = rates_of_scheduler(
        lambda o: transformers.get_wsd_schedule(
            o,
            num_warmup_steps=WARMUP,
            num_decay_steps=WSD_DECAY,
            num_training_steps=DECAY,
            decay_type={"minus_sqrt": "1-sqrt"}.get(wsd_style, wsd_style),
            min_lr_ratio=0.1,
        ),
        DECAY + 1,
    )
    # transformers' warm-up starts at min_lr, ours at init_lr.
    assert [ours(step) for step in range(WARMUP, DECAY + 1)] == pytest.approx(theirs[WARMUP:])


def test_against_torch_cosine_with_floor():
    ours = schedule("cosine", warmup=0, min_lr=3e-5)
    theirs = rates_of_scheduler(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, DECAY, eta_min=3e-5), DECAY + 1
    )
    assert [ours(step) for step in range(DECAY + 1)] == pytest.approx(theirs, rel=1e-9)


BY_HAND = [
    # Warm-up of 10 from 0.1 to 1; decay ends at 110 and leaves 0.2.
    ("linear", 0, 0.1),
    ("linear", 5, 0.55),
    ("linear", 10, 1.0),
    ("linear", 35, 0.8),
    ("linear", 110, 0.2),
    ("linear", 111, 0.2),
    ("cosine", 60, 0.6),
    ("cosine", 35, 0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5))),
    ("constant", 5, 0.55),
    ("constant", 1000, 1.0),
    ("inverse-square-root", 40, 0.5),
    ("inverse-square-root", 90, 1 / 3),
    ("inverse-square-root", 111, 0.2),
    ("WSD", 70, 1.0),
    ("WSD", 90, 0.2 + 0.8 * (2 * math.sqrt(0.5) - 1)),
    ("WSD", 110, 0.2),
    ("WSD", 500, 0.2),
]


@pytest.mark.parametrize("style, progress, rate", BY_HAND)
def test_against_numbers_by_hand(style, progress, rate):
    ours = LearningRateSchedule(
        lr=1.0,
        min_lr=0.2,
        init_lr=0.1,
        style=style,
        warmup=10,
        decay=110,
        wsd_decay=40 if style == "WSD" else None,
        wsd_style="exponential",
    )
    assert ours(progress) == pytest.approx(rate, rel=1e-12)


def test_inverse_square_root_does_not_fall_under_min_lr():
    ours = schedule("inverse-square-root", min_lr=LR / 2, warmup=1, decay=1000)
    assert ours(2) > LR / 2
    assert ours(100) == LR / 2


def test_inverse_square_root_without_warmup_starts_at_lr():
    ours = schedule("inverse-square-root", warmup=0)
    assert [ours(0), ours(1), ours(4)] == pytest.approx([LR, LR, LR / 2])


@given(
    style=st.sampled_from(CHOICES["lr_decay_style"]),
    wsd_style=st.sampled_from(CHOICES["lr_wsd_decay_style"]),
    warmup=st.integers(0, 40),
    steps=st.lists(st.integers(0, 200), min_size=2, max_size=20),
)
def test_rises_then_falls_within_its_bounds(style, wsd_style, warmup, steps):
    ours = schedule(style, warmup=warmup, min_lr=1e-5, init_lr=2e-5, wsd_style=wsd_style)
    before = [ours(step) for step in sorted(steps) if step <= warmup]
    after = [ours(step) for step in sorted(steps) if step > warmup]
    assert before == sorted(before)
    assert after == sorted(after, reverse=True)
    assert all(1e-5 - 1e-12 <= rate <= LR + 1e-12 for rate in before + after)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"warmup": 50}, ("--lr-warmup-samples 50", "--lr-decay-samples 50")),
        ({"warmup": -1}, ("--lr-warmup-samples -1",)),
        ({"decay": 0}, ("--lr-decay-samples 0",)),
        (
            {"warmup_unit": "iters", "start": 50},
            ("--lr-warmup-iters 7 ends after 50 samples", "--lr-decay-samples 50"),
        ),
        ({"min_lr": 1e-3}, ("--min-lr 0.001", "--lr 0.0003")),
        ({"min_lr": -1.0}, ("--min-lr -1",)),
        ({"init_lr": 1.0}, ("--lr-warmup-init 1", "--lr 0.0003")),
        ({"style": "WSD", "wsd_decay": None}, ("WSD", "--lr-wsd-decay-samples")),
        ({"style": "WSD", "wsd_decay": 51}, ("--lr-wsd-decay-samples 51", "--lr-decay-samples 50")),
    ],
)
def test_errors_name_the_flags(changes, words):
    with pytest.raises(ConfigError) as error:
        schedule(**({"style": "linear", "unit": "samples"} | changes))
    for word in words:
        assert word in str(error.value)


def test_weight_decay_against_numbers_by_hand():
    linear = WeightDecaySchedule(0.1, 0.5, "linear", 100)
    cosine = WeightDecaySchedule(0.1, 0.5, "cosine", 100)
    assert [linear(n) for n in (0, 25, 100, 101)] == pytest.approx([0.1, 0.2, 0.5, 0.5])
    quarter = 0.1 + 0.4 * 0.5 * (1 - math.sqrt(0.5))
    assert [cosine(n) for n in (0, 25, 50, 100, 500)] == pytest.approx(
        [0.1, quarter, 0.3, 0.5, 0.5]
    )
    assert WeightDecaySchedule(0.1, 0.1)(12345) == 0.1


@pytest.mark.parametrize(
    "values, word",
    [
        ((0.2, 0.1, "linear", 10), "--end-weight-decay 0.1"),
        ((-0.2, 0.1, "linear", 10), "--start-weight-decay -0.2"),
    ],
)
def test_weight_decay_errors_name_the_flags(values, word):
    with pytest.raises(ConfigError, match=word):
        WeightDecaySchedule(*values)


@pytest.mark.parametrize("style, exponent", [("power", -0.51), ("inverse-square-root", -0.5)])
def test_powers_with_a_timescale_and_a_linear_tail(style, exponent):
    """lr ((s - w + t) / t)^b (Zhai et al. 2021; OLMo's PowerLR with t = w), then a line to min."""
    warmup, scale, end, tail, low = 10, 25, 200, 40, 0.01
    ours = LearningRateSchedule(
        1.0, low, 0.0, style, warmup, end, tail, "linear", exponent=exponent, timescale=scale
    )

    def power(s):
        return ((s - warmup + scale) / scale) ** exponent

    for s in range(warmup + 1, end - tail + 1):
        assert ours(s) == pytest.approx(power(s), rel=1e-12)
    for s in range(end - tail, end + 1):
        line = low + (power(end - tail) - low) * (end - s) / tail
        assert ours(s) == pytest.approx(line, rel=1e-12)
    assert ours(end) == ours(end + 1) == low
    of_warmup = LearningRateSchedule(1.0, 0.0, 0.0, style, warmup, end, exponent=exponent)
    assert of_warmup(90) == pytest.approx((90 / warmup) ** exponent, rel=1e-12)


def test_a_timescale_of_the_warmup_is_megatrons_formula():
    plain = LearningRateSchedule(1.0, 0.0, 0.0, "inverse-square-root", 10, 200)
    scaled = LearningRateSchedule(1.0, 0.0, 0.0, "inverse-square-root", 10, 200, timescale=10)
    assert [plain(s) for s in range(200)] == pytest.approx([scaled(s) for s in range(200)])
