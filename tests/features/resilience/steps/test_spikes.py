"""Which steps are spikes, and which samples are skipped after them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import KEPT, tag
from megatron.config import CheckpointConfig
from megatron.data.sampler import continued_ranges
from megatron.engine.saving import SaveResult
from megatron.engine.train_engine import StepResult
from megatron.features.older_checkpoints.retention import superseded
from megatron.features.resilience.flags import ResilienceConfig
from megatron.features.resilience.steps.spikes import (
    LEVEL,
    PATIENCE,
    Rollback,
    SpikeGuard,
    SpikeRule,
    stop_at_spike,
)
from megatron.training.checkpoints import CheckpointManager
from megatron.training.stopping import DelayedReads, NonFiniteGuard, TrainingStopped
from megatron.training.trainer import GoBack, Step

STEPS = 20_000
CURVE = 2 + 8 * np.exp(-np.arange(STEPS) / 300) + 0.5 * np.exp(-np.arange(STEPS) / 5000)
NORMS = 0.5 + 3 * np.exp(-np.arange(STEPS) / 200)


def noise(kind: str) -> np.ndarray:
    """Of the logarithm of a loss, in every step."""
    rng = np.random.default_rng(1)
    if kind == "wave":  # neighbours are alike, as in data that are not shuffled well
        return 0.1 * np.sin(np.arange(STEPS) / 30) + rng.normal(0, 0.02, STEPS)
    return {
        "small": lambda: rng.normal(0, 0.005, STEPS),
        "large": lambda: rng.normal(0, 0.3, STEPS),
        "skewed": lambda: rng.exponential(0.2, STEPS),
        "tails": lambda: rng.laplace(0, 0.1, STEPS),
    }[kind]()


def spikes(rule: SpikeRule, losses, norms, lengths=None) -> list[int]:
    """The steps that are, from 0."""
    lengths = [16] * len(losses) if lengths is None else lengths
    steps = zip(losses, norms, lengths, strict=True)
    return [n for n, step in enumerate(steps) if rule.add(*map(float, step)) is not None]


@pytest.mark.parametrize("kind", ["small", "large", "skewed", "tails", "wave"])
def test_ordinary_steps_are_none(kind):
    found = noise(kind)
    assert spikes(SpikeRule(10.0, 100), CURVE * np.exp(found), NORMS * np.exp(2 * found)) == []


def test_warm_up_plateau_and_growing_batches_are_none():
    rng = np.random.default_rng(2)
    steps = np.arange(3000)
    # Flat while the learning rate is small, then falling faster and faster, then flat.
    fall = 3 / (1 + np.exp(-(steps - 700) / 60.0))
    size = np.where(steps < 1500, 1, 16)
    losses = (5.5 - fall) * np.exp(rng.normal(0, 0.002, 3000) / np.sqrt(size))
    norms = np.where(steps < 300, 1 + steps / 30, 11 - 10 * (1 - np.exp(-(steps - 300) / 99.0)))
    assert spikes(SpikeRule(10.0, 100), losses, norms / np.sqrt(size)) == []


def test_norms_that_rise_in_the_warm_up_are_none():
    rng = np.random.default_rng(4)
    rise = np.interp(np.arange(600), [0, 40, 70, 71, 200, 600], [2, 1.5, 1.6, 5.7, 2, 1])
    assert spikes(SpikeRule(10.0, 100), CURVE[:600], rise * np.exp(rng.normal(0, 0.05, 600))) == []


def test_a_batch_of_another_kind_is_none():
    """Such as a table between paragraphs, at few tokens a batch: rare, and not far off."""
    losses = CURVE * np.exp(np.random.default_rng(5).normal(0, 0.06, STEPS))
    losses[[4228, 9000, 9003]] *= 1.85
    losses[15_000] *= 5.5
    assert spikes(SpikeRule(10.0, 100), losses, np.ones(STEPS)) == [15_000]


@pytest.mark.parametrize(
    ("at", "loss", "norm", "what"),
    [
        (2000, 5.5, 381.0, "loss"),  # times the curve
        (60, 2.0, 1.0, "loss"),
        (2000, 0.001, 1.0, "loss"),
        (2000, 1.3, 1.0, "loss"),
        (2000, 1.0, 40.0, "gradient norm"),
    ],
)
def test_a_spike_is_found_at_its_step(at, loss, norm, what):
    losses, norms = CURVE * np.exp(noise("small")), NORMS * np.exp(4 * noise("small"))
    losses[at] *= loss
    norms[at] *= norm
    rule = SpikeRule(10.0, 100)
    assert spikes(rule, losses[:at], norms[:at]) == []
    spike = rule.check(losses[at], norms[at], 16)
    assert spike is not None and spike.what == what
    assert not spike.low <= spike.value <= spike.high
    assert rule.check(CURVE[at], NORMS[at], 16) is None
    assert spikes(rule, losses[at : at + 500], norms[at : at + 500]) == [0]


def test_a_new_level_and_a_new_length_are_learned():
    losses = np.concatenate([np.full(200, 2.0), np.full(300, 4.0)])
    losses *= np.exp(np.random.default_rng(3).normal(0, 0.01, 500))
    ones = np.ones(500)
    assert spikes(SpikeRule(10.0, 100), losses, ones) == list(range(200, 200 + PATIENCE))
    lengths = [16] * 200 + [32] * 300
    assert spikes(SpikeRule(10.0, 100), losses, ones, lengths) == []
    losses[200 + LEVEL + 1] *= 3
    assert spikes(SpikeRule(10.0, 100), losses, ones, lengths) == [200 + LEVEL + 1]


def test_a_resumed_rule_judges_the_same():
    losses = CURVE[:900] * np.exp(noise("small")[:900])
    losses[[500, 640, 700]] *= 9
    whole = SpikeRule(10.0, 100)
    found = spikes(whole, losses, NORMS[:900])
    assert found == [500, 640, 700]
    for cut in (30, 501, 640, 641):
        first, second = SpikeRule(10.0, 100), SpikeRule(10.0, 100)
        begun = spikes(first, losses[:cut], NORMS[:cut])
        second.restore(json.loads(json.dumps(first.state())))
        rest = spikes(second, losses[cut:], NORMS[cut:900])
        assert begun + [cut + n for n in rest] == found
        assert second.state() == whole.state()


class Report:
    main = True

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def event(self, *what: object) -> None:
        self.said.append(f"event {what[0]}")


def default_rule() -> SpikeRule:
    flags = ResilienceConfig()
    return SpikeRule(flags.spike_sigma, flags.spike_window)


def judged(lag: int, losses, act, settle_every: int = 10) -> tuple[list[str], str]:
    """What is said of a run whose numbers arrive so many steps late, and what ends it."""
    report = Report()
    checkpoints = SimpleNamespace(
        report=report,
        counted={},
        saved_before=lambda iteration: None,
        newest_shown="the last good checkpoint is a",
        writer=SimpleNamespace(options=SimpleNamespace(save=None)),
    )
    steps = NonFiniteGuard(torch.device("cpu"), False, True)
    steps._reads = DelayedReads(lag)
    SpikeGuard(steps, default_rule(), checkpoints, act(checkpoints))
    try:
        for at, value in enumerate(losses, start=1):
            trainer = SimpleNamespace(iteration=at, at_end=False)
            loss, bad = torch.tensor(value), torch.tensor(float(not np.isfinite(value)))
            result = StepResult(loss, {}, torch.tensor(1.0), bad, 1.0, own_loss=loss)
            steps.after_step(trainer, Step(result, at, 4 * (at - 1), 4, 16, 1e-3, 0.0))
            if at % settle_every == 0:
                steps.settle(trainer)
    except (GoBack, TrainingStopped) as end:
        return report.said, f"{type(end).__name__} {end}"
    return report.said, ""


def going_back(checkpoints):
    def back(trainer, step, spike):
        raise GoBack(lambda trainer: None)

    return back


@pytest.mark.parametrize("lag", [0, 2])
def test_a_spike_is_judged_before_the_nan_after_it(lag):
    """It leads back to a checkpoint, and the NaN ends the run only where it came first."""
    usual = 2 * np.exp(np.random.default_rng(6).normal(0, 0.01, 78))
    said, end = judged(lag, [*usual, 40.0, np.nan], going_back)
    assert said[0].startswith("WARNING: spike at iteration 79, samples 312 to 315: loss 40")
    assert end == "GoBack "
    said, end = judged(lag, [*usual, np.nan, 40.0], going_back)
    assert not said and end.startswith("TrainingStopped the loss is nan at iteration 79")


def test_a_stop_at_a_spike_needs_a_change_of_the_flags():
    """The same command would find the same spike: the status is 2, after which nothing starts the
    run again."""
    usual = 2 * np.exp(np.random.default_rng(6).normal(0, 0.01, 78))
    _, end = judged(0, [*usual, 40.0], stop_at_spike)
    assert end.startswith("TrainingStopped --on-spike stop: iteration 79 has loss 40, expected")
    assert end.endswith("--skip-samples 312:316 trains without its samples")


def test_numbers_without_a_logarithm_are_not_judged():
    rule = SpikeRule(10.0, 20)
    assert spikes(rule, [-1.0, 0.5, 0.0] * 50, [0.0, 1.0, float("inf")] * 50) == []


@pytest.mark.parametrize(
    ("before", "at", "first"),
    [([], 38, 148), ([38], 38, 144), ([38, 38], 40, 144), ([38, 39, 38], 38, 120), ([9], 38, 148)],
)
def test_more_is_skipped_where_it_did_not_help(before, at, first):
    report = SimpleNamespace()
    checkpoints = SimpleNamespace(counted={}, report=report)
    begin = SimpleNamespace(skip_samples=("1:3",))
    rollback = Rollback(5, SpikeRule(10.0, 100), checkpoints, begin, None, ())
    rollback._spikes = [*before, at]
    step = SimpleNamespace(iteration=at, first_sample=4 * (at - 1), samples=4)
    assert rollback._first_skipped(step, 0) == first
    assert rollback._first_skipped(step, 146) == max(146, first)
    assert checkpoints.counted["skip_samples"]() == ["1:3"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["1:3"], ["1:3", "20:24"]),  # the same command as before
        (["1:3", "20:24"], ["1:3", "20:24"]),  # with what the log said
        (["1:3", "40:44"], ["1:3", "20:24", "40:44"]),
        (["2:3"], ["2:3"]),  # refused later
    ],
)
def test_what_a_resumed_run_skips(flags, found):
    assert continued_ranges(["1:3"], ["1:3", "20:24"], flags) == tuple(found)


class Writer:
    """Whose save of one iteration fails; all end in the background, when they are waited for."""

    def __init__(self, folder: Path, fails: int) -> None:
        self.options, self.in_background = CheckpointConfig(save=str(folder)), True
        self.folder, self.fails, self.pending = folder, fails, []

    def save(self, iteration: int, counters: object) -> None:
        before = self.pending
        error = CheckpointError("the disk is full") if iteration == self.fails else None
        if error is None:
            (self.folder / tag(iteration)).mkdir()
            (self.folder / tag(iteration) / "manifest.json").write_text("{}")
        self.pending = [SaveResult(iteration, error, 0.0, 0.0)]
        self.ended = before

    def finished(self, wait: bool = False) -> list[SaveResult]:
        ended, self.ended = self.ended, []
        if wait:
            ended, self.pending = [*ended, *self.pending], []
        return ended


@pytest.mark.parametrize("waited", [False, True])
def test_a_failed_save_is_not_kept_in_place_of_a_good_one(tmp_path, waited):
    """Whether or not its failure is known before the spike."""
    report = Report()
    checkpoints = CheckpointManager(Writer(tmp_path, fails=20), report)
    steps = NonFiniteGuard(torch.device("cpu"), False, True)
    spikes = SpikeGuard(steps, default_rule(), checkpoints)
    checkpoints.save(10, 40)
    checkpoints.save(20, 80)
    if waited:
        checkpoints.settled()
    assert spikes._keep(25, "a spike") == "global_step10 is kept"
    assert "WARNING: no checkpoint at iteration 20" in report.said
    checkpoints.save(30, 120)
    assert superseded(tmp_path, 30, 1, None) == []


def test_checkpoints_before_spikes_are_kept(tmp_path):
    for iteration in range(1, 6):
        folder = tmp_path / f"global_step{iteration}"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    (tmp_path / KEPT).write_text(json.dumps({"kept": [{"checkpoint": "global_step2"}]}))
    names = [path.name for path in superseded(tmp_path, 5, 1, None)]
    assert names == ["global_step1", "global_step3", "global_step4"]
