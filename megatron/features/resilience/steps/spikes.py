"""Spikes: steps whose loss or gradient norm is far from the values of the steps before.

The rule works on logarithms, in which the noise of a loss is about as large at its end as at its
beginning, and compares a step with the level and the trend of the few before it: a curve may fall
fast, or rise slowly, without an alarm. How far off is far is learned from a window of steps.
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

LEVEL = 7  # steps whose median and trend the next one is compared with

PATIENCE = 10  # spikes in a row after which their level is the new one

_LEAST_LOSS = 0.01
"""Added to losses before the logarithm, so that noise near 0 means nothing."""

TAIL = 2.0
"""The largest distance times this is still no spike, which a skewed distribution needs."""

RARE = 3.5
"""Treated as equal within this limit: one batch in 10,000 is unlike any before."""

FORGETS = 0.9999  # what remains of the largest distance after a step: half after 7,000

MOST_KEPT = 3  # checkpoints that are kept since a spike followed them


@dataclass(frozen=True)
class Spike:
    """A step that is out of range; ``what`` is "loss" or "gradient norm"."""

    what: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.what} {self.value:.4g}, expected {self.low:.4g} to {self.high:.4g}"


class _Range:
    """The range of one number, learned from its past; :attr:`level` are the logarithms of the last
    steps, :attr:`distances` how far the values of the window were from the expected ones.

    Args:
        sigma: half of its width, in standard deviations.
        window: number of steps from which the deviation is learned.
        least: what is always within it, as a difference of logarithms.
        rare: how far :data:`RARE` reaches, likewise.
        offset: see :data:`_LEAST_LOSS`.
        below: whether there is a lower end.
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
        """Return the range if the value is outside of it."""
        at = self._scaled(value)
        if at is None or len(self.level) < LEVEL or len(self.distances) < self._armed_after:
            return None
        low, high = self._expected()
        off = max(low - at, at - high)
        # In most steps the first comparison decides; the deviation takes longer.
        # While few steps are known, as in the warm-up, in which norms rise, they say less.
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
        """Range of the next logarithm: from no trend in the last steps to their trend."""
        level = self.level
        middle = median(level)
        # The middles of the first and the last steps are as far apart as the middle of all and the
        # next step.
        trend = median((level[-1], level[-2], level[-3])) - median((level[0], level[1], level[2]))
        return min(middle, middle + trend), max(middle, middle + trend)

    def _deviation(self) -> float:
        return math.sqrt(math.fsum(off * off for off in self.distances) / len(self.distances))

    def add(self, value: float) -> None:
        """Learns from an ordinary step."""
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
        """State of the rule, as JSON values."""
        return {
            "level": list(self.level),
            "distances": list(self.distances),
            "largest": self.largest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`, for a window of any length."""
        self.level = deque(map(float, state["level"]), LEVEL)
        self.distances = deque(map(float, state["distances"]), self.distances.maxlen)
        self.largest = float(state["largest"])

    def forget(self) -> None:
        """Drops what it has learned."""
        self.restore({"level": (), "distances": (), "largest": 0.0})


class SpikeRule:
    """Rule that tells spikes from other steps by the steps before them; the same numbers give the
    same answers.

    After a change of ``seq_length`` the next :data:`LEVEL` steps are not judged. After
    :data:`PATIENCE` spikes in a window the rule learns from the next half of one.
    """

    def __init__(self, sigma: float, window: int) -> None:
        self._window = window
        # What is always ordinary: a fifth more or less of a loss, five times a gradient norm: it is
        # clipped, and what hurts shows in the loss. A norm falls for good reasons, and has no lower
        # end.
        self._loss = _Range(sigma, window, math.log(1.2), math.log(2.25), _LEAST_LOSS, below=True)
        self._norm = _Range(sigma, window, math.log(5.0), math.log(10.0), 1e-12, below=False)
        self._seq_length: int | None = None
        self._since: list[int] = []
        """Steps since the spikes of the window, oldest first; 0 for the last step."""

    @property
    def in_burst(self) -> bool:
        """True if the last step was a spike."""
        return bool(self._since) and self._since[-1] == 0

    def check(self, loss: float, grad_norm: float, seq_length: int) -> Spike | None:
        """True if the next step is a spike; it is not learned from."""
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
        """Judges the next step and learns from it."""
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
        """State of the rule, as JSON values."""
        return {
            "loss": self._loss.state(),
            "grad_norm": self._norm.state(),
            "seq_length": self._seq_length,
            "since": self._since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`; an empty one, of an older checkpoint, means nothing
        learned."""
        self._loss.forget()
        self._norm.forget()
        self._seq_length, self._since = None, []
        if state:
            self._loss.restore(state["loss"])
            self._norm.restore(state["grad_norm"])
            self._seq_length, self._since = state["seq_length"], list(state["since"])


OnSpike = Callable[[Trainer, Step, Spike], None]
"""Reaction to the first spike of a burst, on every rank; if it returns, the training continues."""


class SpikeGuard(Callback):
    """Judges steps as ``steps`` reads their numbers, and warns of spikes; ``act`` follows a
    warning. The checkpoint before a spike is kept from ``--keep-last``, until :data:`MOST_KEPT`
    later spikes."""

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
        """Adds the checkpoint before the spike to the file KEPT; returns words about it."""
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
    """For ``--on-spike stop``: ends the run. Nothing is saved after a spike."""

    def stop(trainer: Trainer, step: Step, spike: Spike) -> None:
        raise TrainingStopped(
            f"--on-spike stop: iteration {step.iteration} has {spike}; nothing is saved after it, "
            f"and {checkpoints.newest_shown}. --skip-samples {step.first_sample}:"
            f"{step.first_sample + step.samples} trains without its samples"
        )

    return stop


class Rollback(Callback):
    """``--on-spike rollback``: back to the last checkpoint, without the samples of the spike. What
    is skipped follows from the steps alone, so that a run that is killed and repeats them skips the
    same samples.

    Attributes:
        origin: the checkpoint that the state of the run came from.
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
        """The iterations with spikes that led back to the same checkpoint, in turn."""
        checkpoints.counted[SKIPPED] = lambda: list(self._skipped)

    def __call__(self, trainer: Trainer, step: Step, spike: Spike) -> None:
        """Raises GoBack, or TrainingStopped after too many rollbacks; returns without a
        checkpoint."""
        newest = self._checkpoints.settled()
        if newest is not None and not newest.is_dir():  # of an earlier run, and deleted
            newest = None
        # Where a save ended badly on one rank alone, the others know of another one.
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
        """Records it next to the metrics, which begin at the checkpoint then."""
        values: dict[str, float | None] = {
            "spike_iteration": self._spikes[-1],
            "skipped_from": self._new.start,
            "skipped_to": self._new.stop,
        }
        report = self._checkpoints.report
        report.event("rollback", trainer.iteration, trainer.consumed_samples, values)

    def _found(self, folder: Path) -> FoundCheckpoint:
        """The checkpoint in a folder; every run has opened, or saved, it before."""
        if self._origin is not None and self._origin.found.folder == folder:
            return self._origin.found
        checkpoint = locate_checkpoint(folder)
        if checkpoint is None:
            raise CheckpointError(f"{folder}: the checkpoint to go back to has been deleted")
        base = None if self._origin is None else self._origin.found.base
        return checkpoint._replace(base=base)

    def _first_skipped(self, step: Step, consumed_samples: int) -> int:
        """Return the first sample to skip: the step's first, or one, three, seven steps earlier if
        the steps around it were spikes before."""
        again = 0
        for one, next_one in zip(self._spikes[-2::-1], self._spikes[:0:-1], strict=True):
            if abs(next_one - one) > LEVEL:
                break
            again += 1
        earlier = (2**again - 1) * step.samples
        return max(consumed_samples, step.first_sample - earlier)
