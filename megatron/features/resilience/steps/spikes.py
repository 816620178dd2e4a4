"""Detection of spikes: steps whose loss or gradient norm is far from those of preceding steps.

The rule works on logarithms, where a loss is about equally noisy throughout training. It compares a
step with the level and trend of the last few steps, so that a curve may fall fast or rise slowly
without an alarm. The allowed distance is learned from a window of steps.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import KEPT, tag
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint
from megatron.data.build import DataFile
from megatron.training import resume
from megatron.training.checkpoints import CheckpointManager
from megatron.training.resume import SKIPPED, ResumePoint, ResumeSource
from megatron.training.stopping import NonFiniteGuard, TrainingStopped
from megatron.training.trainer import Callback, GoBack, Step, Trainer
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json

LEVEL = 7  # number of steps whose median and trend predict the next one

PATIENCE = 10  # spikes within a window after which the rule learns the new level

_LEAST_LOSS = 0.01
"""Offset added to losses before the logarithm, so that noise near 0 does not count."""

TAIL = 2.0
"""Multiple of the largest distance so far within which a value is never a spike (losses are
skewed)."""

RARE = 3.5
"""Larger multiple that replaces TAIL, but only up to the absolute limit ``rare`` of a range,
because about one batch in 10,000 is unlike any before it."""

FORGETS = 0.9999  # decay of the largest distance per step, which halves it in 7,000 steps

MOST_KEPT = 3  # maximum number of checkpoints kept because a spike followed them


@dataclass(frozen=True)
class Spike:
    """Value that is out of range. ``what`` is "loss" or "gradient norm"."""

    what: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.what} {self.value:.4g}, expected {self.low:.4g} to {self.high:.4g}"


class _Range:
    """Expected range of a loss or gradient norm, learned from its past values.

    :attr:`level` contains the logarithms of the last steps. :attr:`distances` contains the
    distances of the window's values from the values that were expected.

    Args:
        sigma: half the width of the range, in standard deviations.
        window: number of steps from which the standard deviation is learned.
        least: distance that is always in range, as a difference of logarithms.
        rare: largest distance to which :data:`RARE` applies, as a difference of logarithms.
        offset: added to a value before the logarithm; see :data:`_LEAST_LOSS`.
        below: True if the range has a lower bound.
    """

    def __init__(
        self, sigma: float, window: int, least: float, rare: float, offset: float, below: bool
    ) -> None:
        self._sigma, self._least, self._rare = sigma, least, rare
        self._offset, self._below, self._window = offset, below, window
        self._armed_after = max(LEVEL, window // 2)
        self.level: deque[float] = deque(maxlen=LEVEL)
        self.distances: deque[float] = deque(maxlen=window)
        self.largest = 0.0

    def _scaled(self, value: float) -> float | None:
        shifted = value + self._offset
        return math.log(shifted) if math.isfinite(value) and shifted > 0 else None

    def find(self, value: float) -> tuple[float, float] | None:
        """Return the bounds of the range if the value is outside; None if not, or too early to
        tell."""
        at = self._scaled(value)
        if at is None or len(self.level) < LEVEL or len(self.distances) < self._armed_after:
            return None
        low, high = self._expected()
        off = max(low - at, at - high)
        # Check the cheap limit first, which most steps pass; the deviation takes longer. The range
        # is wider while few steps are known, as in warm-up, when norms rise.
        unsure = max(1.0, self._window / len(self.distances))
        tail = max(TAIL * self.largest, min(RARE * self.largest, self._rare))
        width = unsure * max(self._least, tail)
        if off <= width or (at < low and not self._below):
            return None
        width = max(width, unsure * self._sigma * self._deviation())
        if off <= width:
            return None
        least = math.exp(low - width) - self._offset if self._below else 0.0
        return max(least, 0.0), math.exp(high + width) - self._offset

    def _expected(self) -> tuple[float, float]:
        """Return the range expected for the next logarithm, between the median of the last steps
        and that median plus their trend."""
        level = self.level
        middle = median(level)
        # The first three and the last three steps are, from median to median, as many steps apart
        # as the
        # middle of all steps and the next one: their difference is the change to expect.
        trend = median((level[-1], level[-2], level[-3])) - median((level[0], level[1], level[2]))
        return min(middle, middle + trend), max(middle, middle + trend)

    def _deviation(self) -> float:
        return math.sqrt(math.fsum(off * off for off in self.distances) / len(self.distances))

    def add(self, value: float) -> None:
        """Learn from a value that was not a spike."""
        at = self._scaled(value)
        if at is None:
            return
        if len(self.level) == LEVEL:
            low, high = self._expected()
            off = max(low - at, at - high, 0.0)
            self.distances.append(off)
            if off > self.largest:
                off = min(off, TAIL * max(self.largest, self._deviation()))
            self.largest = max(off, FORGETS * self.largest)
        self.level.append(at)

    def state(self) -> dict[str, Any]:
        """Return the learned values as JSON-compatible data."""
        return {
            "level": list(self.level),
            "distances": list(self.distances),
            "largest": self.largest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`. It may come from a run with a different window."""
        self.level = deque(map(float, state["level"]), LEVEL)
        self.distances = deque(map(float, state["distances"]), self.distances.maxlen)
        self.largest = float(state["largest"])

    def forget(self) -> None:
        """Drop everything learned."""
        self.restore({"level": (), "distances": (), "largest": 0.0})


class SpikeRule:
    """Rule that tells spikes from ordinary steps, based on the preceding steps. It is
    deterministic. After a change of ``seq_length``, the next :data:`LEVEL` steps are not judged.
    After :data:`PATIENCE` spikes within a window, the rule forgets what it has learned, and judges
    again after half a window.
    """

    def __init__(self, sigma: float, window: int) -> None:
        self._window = window
        # Always in range: a loss up to a fifth larger or smaller, and a gradient norm up to five
        # times as large, as norms are clipped and harm shows in the loss. Norms may fall without
        # limit.
        self._loss = _Range(sigma, window, math.log(1.2), math.log(2.25), _LEAST_LOSS, below=True)
        self._norm = _Range(sigma, window, math.log(5.0), math.log(10.0), 1e-12, below=False)
        self._seq_length: int | None = None
        self._since: list[int] = []
        """Number of steps since each spike of the window, oldest first; 0 for the last step."""

    @property
    def in_burst(self) -> bool:
        """True if the last step was a spike."""
        return bool(self._since) and self._since[-1] == 0

    def check(self, loss: float, grad_norm: float, seq_length: int) -> Spike | None:
        """Return the spike if the next step is one, else None. Does not learn from the step."""
        if self._seq_length not in (None, seq_length):
            return None
        for what, value, of in (
            ("loss", loss, self._loss),
            ("gradient norm", grad_norm, self._norm),
        ):
            spike = of.find(value)
            if spike is not None:
                return Spike(what, value, *spike)
        return None

    def add(self, loss: float, grad_norm: float, seq_length: int) -> Spike | None:
        """Judge the next step and learn from it. Return the spike, or None."""
        spike = self.check(loss, grad_norm, seq_length)
        self._since = [ago + 1 for ago in self._since if ago + 1 < self._window]
        if spike is not None:
            self._since.append(0)
            if len(self._since) == PATIENCE:
                self._since = [0]
                self._loss.forget()
                self._norm.forget()
            return spike
        if self._seq_length != seq_length:
            self._loss.level.clear()
            self._norm.level.clear()
        self._seq_length = seq_length
        self._loss.add(loss)
        self._norm.add(grad_norm)
        return None

    def state(self) -> dict[str, Any]:
        """Return the state of the rule as JSON-compatible data."""
        return {
            "loss": self._loss.state(),
            "grad_norm": self._norm.state(),
            "seq_length": self._seq_length,
            "since": self._since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`. An empty state (old checkpoints) resets the rule."""
        self._loss.forget()
        self._norm.forget()
        self._seq_length, self._since = None, []
        if state:
            self._loss.restore(state["loss"])
            self._norm.restore(state["grad_norm"])
            self._seq_length, self._since = state["seq_length"], list(state["since"])


OnSpike = Callable[[Trainer, Step, Spike], None]
"""Action at the first spike of a burst, called on every rank. If it returns, training continues."""


class SpikeGuard(Callback):
    """Callback that judges each step once ``steps`` has read its loss and gradient norm, and warns
    of spikes.

    ``act`` is called after a warning. The checkpoint before a spike is exempt from ``--keep-last``
    until :data:`MOST_KEPT` later spikes have occurred."""

    def __init__(
        self,
        steps: NonFiniteGuard,
        rule: SpikeRule,
        checkpoints: CheckpointManager,
        act: OnSpike | None = None,
    ) -> None:
        self.rule, self._act = rule, act
        self._checkpoints, self._report = checkpoints, checkpoints.report
        self._burst: int | None = None
        checkpoints.counted["spikes"] = self.rule.state
        steps.judges.append(self._judge)

    def went_back(self, trainer: Trainer) -> None:
        self._burst = None

    def _judge(self, trainer: Trainer, step: Step, loss: float, norm: float) -> None:
        if not math.isfinite(loss):
            return
        before = self.rule.in_burst
        spike = self.rule.add(loss, norm, step.seq_length)
        if spike is None:
            if before and self._burst is not None:
                steps = step.iteration - self._burst
                self._report.say(
                    f"iteration {step.iteration} is in the range again, after {steps} "
                    f"step{'s' * (steps > 1)}"
                )
            return
        if before:
            return
        self._burst = step.iteration
        text = f"spike at iteration {step.iteration}, samples {_samples(step)}: {spike}"
        self._report.say(f"WARNING: {text}; {self._keep(step.iteration, text)}")
        self._report.event(
            "spike",
            step.iteration,
            step.first_sample + step.samples,
            {"loss": loss, "grad_norm": norm, "low": spike.low, "high": spike.high},
        )
        if self._act is not None:
            self._act(trainer, step, spike)

    def _keep(self, iteration: int, text: str) -> str:
        """Record the checkpoint before the spike in the file KEPT, so that it is not deleted.
        Return a phrase for the warning."""
        save = self._checkpoints.writer.options.save
        before = self._checkpoints.saved_before(iteration)
        if before is None or save is None:
            return "this run has saved no checkpoint before it"
        words = f"{tag(before)} is kept"
        if not self._report.main:
            return words
        path = Path(save) / KEPT
        try:
            saved = parse_json(path.read_bytes(), str(path), lenient=True)["kept"]
            kept = [each for each in saved if each["iteration"] != iteration]
        except (OSError, ValueError, KeyError, TypeError):
            kept = []
        kept.append({"checkpoint": tag(before), "iteration": iteration, "reason": text})
        content = {"kept": kept[-MOST_KEPT:]}
        try:
            write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            return f"{path} cannot be written ({error.strerror}), so {tag(before)} may be deleted"
        return words


def _samples(step: Step) -> str:
    return f"{step.first_sample} to {step.first_sample + step.samples - 1}"


def stop_at_spike(checkpoints: CheckpointManager) -> OnSpike:
    """Return the action for ``--on-spike stop``, which ends the run without saving."""

    def stop(trainer: Trainer, step: Step, spike: Spike) -> None:
        raise TrainingStopped(
            f"--on-spike stop: iteration {step.iteration} has {spike}; nothing is saved after it, "
            f"and {checkpoints.newest_shown}. --skip-samples {step.first_sample}:"
            f"{step.first_sample + step.samples} trains without its samples"
        )

    return stop


class Rollback(Callback):
    """Action for ``--on-spike rollback``: return to the last checkpoint and skip the samples of the
    spike.

    The skipped samples depend only on the steps, so a run that is killed and repeats the steps
    skips the same samples.

    Attributes:
        origin: checkpoint from which the current state of the run was loaded.
    """

    def __init__(
        self,
        most: int,
        rule: SpikeRule,
        checkpoints: CheckpointManager,
        begin: ResumePoint,
        origin: ResumeSource | None,
        files: Sequence[DataFile],
    ) -> None:
        self._most, self._rule, self._checkpoints = most, rule, checkpoints
        self._origin, self._files, self.origin = origin, files, origin
        self._skipped = begin.skip_samples
        self._to: Path | None = None
        self._new = range(0)
        self._spikes: list[int] = []
        """Iterations of the spikes that caused rollbacks to the checkpoint ``_to``, in order."""
        checkpoints.counted[SKIPPED] = lambda: list(self._skipped)

    def __call__(self, trainer: Trainer, step: Step, spike: Spike) -> None:
        """Raise GoBack, or TrainingStopped after too many rollbacks to the same checkpoint. If no
        checkpoint exists, print a warning and return."""
        newest = self._checkpoints.settled()
        # An earlier run's checkpoint may have been deleted.
        if newest is not None and not newest.is_dir():
            newest = None
        # If a save failed on one rank only, the ranks have different newest checkpoints.
        newest = trainer.engine.mesh.world.shared(newest)
        report = self._checkpoints.report
        if newest is None:
            report.say(
                "WARNING: --on-spike rollback: there is no checkpoint to go back to, so training "
                "continues; --save-init makes one of the beginning"
            )
            return
        if newest != self._to:
            self._to, self._spikes = newest, []
        if len(self._spikes) == self._most:
            where = ", ".join(map(str, self._spikes))
            raise TrainingStopped(
                f"iteration {step.iteration} has {spike}, after {self._most} rollbacks to {newest} "
                f"for iterations {where} (--spike-rollbacks {self._most}): not its samples, but "
                "the weights or the learning rate make the loss diverge; continue from an older "
                "checkpoint, or with a smaller --lr"
            )
        self._spikes.append(step.iteration)
        raise GoBack(partial(self._go, newest, step))

    def _go(self, folder: Path, step: Step, trainer: Trainer) -> None:
        engine, report = trainer.engine, self._checkpoints.report
        options = engine.config.checkpoint
        checkpoint = self._found(folder)
        self.origin = ResumeSource(checkpoint, f"--load {options.load}", continues=True)
        with engine.replacing_state():
            point = resume.load(engine, trainer.plan, self.origin, self._files)
        first = self._first_skipped(step, point.consumed_samples)
        self._new = range(first, step.first_sample + step.samples)
        new = f"{self._new.start}:{self._new.stop}"
        self._skipped = (*self._skipped, new)
        trainer.data = trainer.data.skipping(self._skipped)
        trainer.iteration, trainer.consumed_samples = point.iteration, point.consumed_samples
        self._rule.restore(point.spikes)
        report.say(
            f"rollback {len(self._spikes)} of at most {self._most}: back from iteration "
            f"{step.iteration} to {point.folder}; skipping samples {new}, as --skip-samples "
            f"{' '.join(self._skipped)} does"
        )

    def went_back(self, trainer: Trainer) -> None:
        """Record the rollback in the metrics file, which has been truncated to the checkpoint."""
        values: dict[str, float | None] = {
            "spike_iteration": self._spikes[-1],
            "skipped_from": self._new.start,
            "skipped_to": self._new.stop,
        }
        report = self._checkpoints.report
        report.event("rollback", trainer.iteration, trainer.consumed_samples, values)

    def _found(self, folder: Path) -> FoundCheckpoint:
        """Return the checkpoint in a folder that this run has loaded from or saved to. Raises
        CheckpointError if it has been deleted."""
        if self._origin is not None and self._origin.found.folder == folder:
            return self._origin.found
        checkpoint = locate_checkpoint(folder)
        if checkpoint is None:
            raise CheckpointError(f"{folder}: the checkpoint to go back to has been deleted")
        base = None if self._origin is None else self._origin.found.base
        return checkpoint._replace(base=base)

    def _first_skipped(self, step: Step, consumed_samples: int) -> int:
        """Return the first sample to skip. It is the first sample of the step, or of the step 1, 3,
        7 ... steps earlier if preceding rollbacks were caused by spikes close to this one."""
        again = 0
        for one, next_one in zip(self._spikes[-2::-1], self._spikes[:0:-1], strict=True):
            if abs(next_one - one) > LEVEL:
                break
            again += 1
        earlier = (2**again - 1) * step.samples
        return max(consumed_samples, step.first_sample - earlier)
