"""Decides when a run saves checkpoints, and handles failed saves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.profiler import record_function

from megatron.checkpoint.files import CheckpointError, NotFiniteError
from megatron.checkpoint.folder import iteration_of, tag
from megatron.engine.saving import CheckpointWriter, LostRanksError, SaveResult
from megatron.training.report import Reporter
from megatron.training.trainer import Callback, Step, Trainer
from megatron.util.phases import activity, phase


class CheckpointManager(Callback):
    """Saves a run's checkpoints: every ``interval`` steps, after every epoch if the plan has
    epochs, at the end, and when the run is stopped. A failed save leaves the earlier checkpoints
    and is reported. The run fails if its last save did, if ``--max-failed-saves`` saves fail in a
    row, or if weights or moments are not finite, since training cannot continue from them.
    ``newest`` is the newest checkpoint, at first the one that the run continues from. ``completed``
    counts the checkpoints saved by this process, including those in host memory. ``check`` gets the
    iteration before every save, on every rank, and raises an error if the state must not be saved.
    ``counted`` has functions by name that return JSON values for ``state.json``."""

    def __init__(
        self,
        writer: CheckpointWriter,
        report: Reporter,
        interval: int | None = None,
        newest: Path | None = None,
        check: Callable[[int], None] = lambda iteration: None,
        counted: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
    ) -> None:
        self.writer, self.report, self.interval = writer, report, interval
        self._check = check
        self.newest, self.completed = newest, 0
        self._show(newest)
        self.error: CheckpointError | None = None
        self.counted = dict(counted)
        self._begun_at: int | None = None
        self._samples: dict[int, int] = {}
        """Number of consumed samples at each save that has not failed, by iteration."""
        self._undecided: deque[SaveResult] = deque()
        self._failed: list[SaveResult] = []

    @record_function("megatron::save")
    def save(self, iteration: int, consumed_samples: int) -> None:
        """Save, or begin to save in the background. Does nothing without ``--save`` or if this step
        is already saved. Raises CheckpointError if this or an earlier failure ends the run."""
        if not self.writer.options.save:
            return
        if self._begun_at == iteration:
            # If this save failed, all ranks must know it before they decide whether to repeat it.
            self._report_finished(wait=True)
        if self._begun_at == iteration:
            return
        self._check(iteration)
        self._begun_at, self._samples[iteration] = iteration, consumed_samples
        with phase("save", self.writer.options.save):
            self.writer.save(iteration, self.counters(consumed_samples))
        self._report_finished()
        # Ranks may learn the outcome of a background save at different times, but all of them know
        # the outcomes of earlier saves.
        self._decide(but=iteration if self.writer.in_background else None)

    def counters(self, consumed_samples: int) -> dict[str, Any]:
        """Return the training's counters for a checkpoint, except the iteration."""
        return {
            "consumed_samples": consumed_samples,
            **{name: value() for name, value in self.counted.items()},
        }

    def saved_before(self, iteration: int) -> int | None:
        """Return the iteration of the newest complete checkpoint in ``--save`` from before this
        step, or None. Waits for a background save. If a save failed after its checkpoint was
        published, only the main process includes it."""
        newest, save = self.settled(), self.writer.options.save
        saved = set(self._samples)
        if newest is not None and save is not None and newest.parent == Path(save):
            saved.add(iteration_of(newest.name) or 0)
        return max((at for at in saved if at < iteration), default=None)

    def settled(self) -> Path | None:
        """Wait for the background save and return :attr:`newest`. Collective."""
        self._report_finished(wait=True)
        return self.newest

    @property
    def newest_shown(self) -> str:
        """Text that names the newest checkpoint. Waits for a background save. Collective."""
        newest = self.settled()
        if newest is None:
            return "there is no earlier checkpoint"
        return f"the last good checkpoint is {newest}"

    def _show(self, newest: Path | None) -> None:
        activity.saved = "" if newest is None else str(newest)

    def before_step(self, trainer: Trainer) -> None:
        """Save the initial state if ``--save-init`` is given."""
        if self.writer.options.save_init and trainer.iteration == 0:
            self.save(0, trainer.consumed_samples)

    def went_back(self, trainer: Trainer) -> None:
        self._begun_at = trainer.iteration if trainer.iteration in self._samples else None

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Report saves that have finished in the background."""
        self._report_finished()

    def between_steps(self, trainer: Trainer) -> None:
        due = self.interval is not None and trainer.iteration % self.interval == 0
        if due or trainer.at_end or trainer.plan.epochs_ended(trainer.iteration):
            self._save_settled(trainer)

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        if reason is not None:
            self._save_settled(trainer)

    def _save_settled(self, trainer: Trainer) -> None:
        trainer.settle()  # never save after a step that was not finite
        self.save(trainer.iteration, trainer.consumed_samples)

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        """Wait for the last save. Raises CheckpointError if it is the first error."""
        for result in self.writer.close():
            self._report(result)
        if error_type is not None:
            return
        self._decide()
        if self.error is not None:
            raise self.error

    def _report_finished(self, wait: bool = False) -> None:
        for result in self.writer.finished(wait=wait):
            self._report(result)

    def _decide(self, but: int | None = None) -> None:
        """End the run if the outcomes of saves, except that of iteration ``but``, require it."""
        limit = self.writer.options.max_failed_saves
        while self._undecided and self._undecided[0].iteration != but:
            result = self._undecided.popleft()
            if result.error is None:
                self._failed.clear()
                continue
            self._failed.append(result)
            if isinstance(result.error, NotFiniteError):
                raise NotFiniteError(
                    f"after iteration {result.iteration}: {result.error}; such a state is not "
                    f"saved, and no step can mend it: {self.newest_shown}"
                )
            if isinstance(result.error, LostRanksError) and not self.writer.in_background:
                # Background saves have connections of their own. Otherwise training's are lost.
                raise CheckpointError(f"{result.error}; {self.newest_shown}") from result.error
            if len(self._failed) == limit:
                which = ", ".join(str(failed.iteration) for failed in self._failed)
                raise CheckpointError(
                    f"{limit} saves in a row failed, of iterations {which} (--max-failed-saves "
                    f"{limit}): {result.error}; {self.newest_shown}"
                )

    def _report(self, result: SaveResult) -> None:
        self.error = result.error
        self._undecided.append(result)
        folder = Path(self.writer.options.save or "") / tag(result.iteration)
        if result.error is None or result.published:
            self.newest = folder
            self._show(folder)
            self.completed += 1
        if result.error is not None:
            self._samples.pop(result.iteration, None)
            if self._begun_at == result.iteration:
                self._begun_at = None  # it may be tried again
            if result.published:
                self.report.say(f"WARNING: {folder} is whole, but its save did not end well")
            else:
                self.report.say(f"WARNING: no checkpoint at iteration {result.iteration}")
            self.report.say(f"WARNING: {result.error}")
            return
        rate = result.bytes / max(result.seconds, 1e-9)
        self.report.say(
            f"saved checkpoint at iteration {result.iteration} to {self.writer.options.save} | "
            f"{result.bytes / 1e6:.1f} MB in {result.seconds:.2f} s ({rate / 1e6:.0f} MB/s) | "
            f"save stall {1000 * result.stall_seconds:.0f} ms"
        )
        for note in result.notes:
            self.report.say(f"WARNING: {note}")
        values: dict[str, float | None] = {
            "stall_seconds": result.stall_seconds,
            "seconds": result.seconds,
            "bytes": result.bytes,
        }
        self.report.event("save", result.iteration, self._samples[result.iteration], values)
