"""``--on-spike rollback``: back to the last checkpoint, in the same process, without the samples of
the spike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint
from megatron.data.build import DataFile
from megatron.features.resilience.unattended.spikes import (
    LEVEL,
    Spike,
    SpikeRule,
)
from megatron.training import resume
from megatron.training.checkpoints import CheckpointManager
from megatron.training.resume import SKIPPED, ResumePoint
from megatron.training.resume_source import ResumeSource
from megatron.training.stopping import TrainingStopped
from megatron.training.trainer import Callback, GoBack, Step, Trainer


class Rollback(Callback):
    """What follows a spike. What is skipped follows from the steps alone, so that a run that is
    killed on its way, and repeats the steps, skips the same samples.

    Args:
        most: see ``--spike-rollbacks``.
        rule: that of the run's steps, which learns from them.
        begin: where the process began.
        origin: the checkpoint of ``begin``.
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
        self._origin, self._files = origin, files
        self._skipped = begin.skip_samples
        self._to: Path | None = None
        self._new = range(0)
        self._spikes: list[int] = []
        """The iterations with spikes that led back to the same checkpoint, in turn."""
        checkpoints.counted[SKIPPED] = lambda: list(self._skipped)

    def __call__(self, trainer: Trainer, step: Step, spike: Spike) -> None:
        """Raises GoBack, or TrainingStopped if that has not helped; returns if there is no
        checkpoint."""
        world = trainer.engine.mesh.world
        # Where a save ended badly on one rank alone, the others know of another one.
        folder = [self._checkpoints.settled()]
        if folder[0] is not None and not folder[0].is_dir():  # of an earlier run, and deleted
            folder = [None]
        if world.size > 1:
            dist.broadcast_object_list(folder, src=0, group=world.handle)
        (newest,) = folder
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
        origin = ResumeSource(self._found(folder), f"--load {options.load}", continues=True)
        with engine.replacing_state():
            point = resume.load(engine, trainer.plan, origin, self._files)
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
        """Records it beside the metrics, which begin at the checkpoint then."""
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
        found = locate_checkpoint(folder)
        if found is None:
            raise CheckpointError(f"{folder}: the checkpoint to go back to has been deleted")
        base = None if self._origin is None else self._origin.found.base
        return found._replace(base=base)

    def _first_skipped(self, step: Step, consumed_samples: int) -> int:
        """The first sample to skip: that of the step, or where the steps about it were spikes
        before, so that its own samples are not the cause, an earlier one: of one step before it,
        of three, of seven."""
        again = 0
        for one, next_one in zip(self._spikes[-2::-1], self._spikes[:0:-1], strict=True):
            if abs(next_one - one) > LEVEL:
                break
            again += 1
        earlier = (2**again - 1) * step.samples
        return max(consumed_samples, step.first_sample - earlier)
