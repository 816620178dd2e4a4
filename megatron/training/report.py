"""Reports a run's progress: log lines from the main process, and metrics for the writers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from megatron.config import Resolved, RunConfig
from megatron.config.features import first_answer, taking_part
from megatron.data.build import PortionSize
from megatron.families import family_of
from megatron.parallel.mesh import Mesh, first_reason
from megatron.training.intervals import IntervalMeter, TimeLeft, Value
from megatron.training.metrics import Evaluation, Reported
from megatron.training.plan import TrainingPlan
from megatron.training.registry import Reduce, WrittenTexts
from megatron.training.resume import ResumePoint
from megatron.training.trainer import Callback, Step, Trainer
from megatron.training.writers import RunWriter, TeeWriter, build_writers, read_metrics
from megatron.util.processes import is_main_process
from megatron.util.progress import above_bars, progress_bar

FIRST_STEPS = 2
"""Number of steps at the start that are logged individually, even with a longer log interval."""


class _LogHandler(logging.StreamHandler[Any]):
    def emit(self, record: logging.LogRecord) -> None:
        with above_bars(self.stream):
            super().emit(record)


class _LogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        return f"warning: {message}" if record.levelno >= logging.WARNING else message


def show_log() -> None:
    """Show the package's log on the console: messages from the main process, and warnings from
    every process. A second call does nothing."""
    logger = logging.getLogger("megatron")
    if logger.handlers:
        return
    handler = _LogHandler()
    handler.setFormatter(_LogFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if is_main_process() else logging.WARNING)
    logger.propagate = False


def say(text: str) -> None:
    """Print a line with a timestamp."""
    with above_bars():
        print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


class Reporter(Callback):
    """Prints log lines and writes metrics. Only the main process prints and writes."""

    def __init__(
        self,
        resolved: Resolved,
        plan: TrainingPlan,
        mesh: Mesh,
        device: torch.device,
        begin: ResumePoint,
        sizes: Callable[[], Sequence[PortionSize]] = list,
        brief: bool = False,
    ) -> None:
        self._brief = brief or sys.stdout.isatty()
        config = resolved.config
        self.plan, self.mesh, self.device = plan, mesh, device
        self.extra_flops: list[Callable[[Step], float]] = []
        """Functions that return FLOPs of a step in addition to the model's own."""
        self.at_line: list[Callable[[float], Mapping[str, float | None]]] = []
        """Functions that return further values of a log line from the seconds left. Collective."""
        self.after_line: list[Callable[[RunWriter], None]] = []
        """Functions that write values after every log line and at the end of training."""
        self.time_left = TimeLeft()
        self.last_words = ""
        self.log_interval = config.logging.log_interval
        self.meter: IntervalMeter | None = None
        self.main = mesh.world.rank == 0
        self.shape = family_of(config.model.family).shape(config.model, config)
        for feature in taking_part():
            self.shape = feature.shape(self.shape, config)
        self.recompute, self.recomputed_blocks = config.parallel.recomputed
        peak = first_answer(lambda feature: feature.peak(config, device)) or (None, "")
        self.peak: float | None = peak[0]
        self._peak_source: str = peak[1]
        self.writer: RunWriter = TeeWriter(())
        if self.main:
            self.writer = build_writers(
                config.logging,
                resume_iteration=begin.iteration,
                resume_samples=begin.consumed_samples,
                configuration=config.to_dict(),
            )
        self._mark_resume(begin.iteration, begin.consumed_samples)
        self._announce(resolved, begin, sizes)
        self._bar = progress_bar(
            "training", total=plan.train_iters, unit=" steps", initial=begin.iteration
        )
        self._early = FIRST_STEPS if self.log_interval > FIRST_STEPS else 0
        """Remaining number of steps that are logged individually."""
        self._last_step = time.monotonic()

    def _mark_resume(self, iteration: int, consumed_samples: int) -> None:
        """Write a row that marks earlier rows as another process's or as rolled back."""
        if iteration:
            self.event("resume", iteration, consumed_samples, {})

    def _announce(
        self, resolved: Resolved, begin: ResumePoint, sizes: Callable[[], Sequence[PortionSize]]
    ) -> None:
        config, origins = resolved.config, resolved.origins.values()
        count = sum(origin.startswith(("flag", "derived")) for origin in origins)
        self.say(f"{count} values given or derived; --explain-config prints all")
        for note in resolved.notes:
            self.say(note)
        layout, axes = config.layout(), config.parallel.in_words()
        numbers = f"ZeRO stage {layout.zero}, {layout.precision} on {self.device.type}"
        self.say(f"layout: {axes}, {numbers}")
        first, *more = config.training.batch_sizes
        growing = f"{first} to " if more else ""
        self.say(
            f"batches: micro {self.plan.micro_batch_size}, "
            f"global {growing}{self.plan.global_batch_size}, {self.plan.full_iters} iterations"
        )
        if self.plan.train_iters < self.plan.full_iters:
            self.say(
                f"--train-tokens {config.training.train_tokens} ends the run after "
                f"{self.plan.train_iters} of its {self.plan.full_iters} iterations, for which the "
                "data are prepared"
            )
        for feature in taking_part() if self.main else ():
            for line in feature.extent(config, self.plan, sizes):
                self.say(line)
        if self.peak is not None:
            counted = "; causal attention counted once" if self.shape.causal else ""
            self.say(
                f"FLOP utilisation is relative to {self.peak / 1e12:.3g} TFLOP/s per device "
                f"({self._peak_source}){counted}"
            )
        if begin.folder is None:
            if config.checkpoint.load:
                self.say(f"no checkpoint in {config.checkpoint.load}: starting from random weights")
            return
        if begin.weights_only:
            self.say(f"weights from {begin.folder}; starting at iteration 0")
        elif begin.restarts:
            self.say(f"weights and optimizer from {begin.folder}; starting at iteration 0")
        elif not self.nothing_left(begin):
            self.say(f"resumed from {begin.folder} at iteration {begin.iteration}")
        for line in begin.notes:
            self.say(line if str(begin.folder) in line else f"{begin.folder}: {line}")
        for line in begin.changed:
            self.say(f"differs from the checkpoint's run: {line}")

    def nothing_left(self, begin: ResumePoint) -> bool:
        """Return whether the checkpoint is from the run's last step or even later."""
        return not self.plan.skip_train and begin.iteration >= self.plan.train_iters

    def evaluated_before(
        self, config: RunConfig, begin: ResumePoint, valid: Sequence[str], test: Sequence[str]
    ) -> bool:
        """Return whether nothing is left to train and the metrics of an earlier start contain the
        final evaluations on all data sets with these names. Collective."""
        if not self.nothing_left(begin):
            return False
        missing = None
        if self.main:
            missing = self._missing_evaluation(config, begin.iteration, valid, test)
        again = first_reason(missing, self.device) is not None
        how = "" if again else "; its evaluations were made, and --skip-train repeats them"
        self.say(
            f"nothing left to train: {begin.folder} has all {self.plan.train_iters} iterations{how}"
        )
        return not again

    def _missing_evaluation(
        self, config: RunConfig, iteration: int, valid: Sequence[str], test: Sequence[str]
    ) -> str | None:
        """Return the kind of an evaluation at this iteration that the metrics lack, or None."""
        due = []
        if self.plan.eval_micro_batches:
            due = [Evaluation(iteration, {}, name).kind for name in valid]
            due += [Evaluation(iteration, {}, name, test=True).kind for name in test]
        file, rows = config.logging.metrics_file, []
        if file is not None and os.path.exists(file):
            rows = read_metrics(file)
        kinds = [row["kind"] for row in rows if row.get("iteration") == iteration]
        missing: str | None = first_answer(lambda f: f.missing_evaluation(config, kinds))
        return missing or next((kind for kind in due if kind not in kinds), None)

    def say(self, text: str) -> None:
        """Print a line with a timestamp, on the main process only."""
        if self.main:
            say(text)

    def before_step(self, trainer: Trainer) -> None:
        """Start the clock at the first step."""
        if self.meter is None:
            self._last_step = time.monotonic()
            self._bar.n = trainer.iteration  # lower after a rollback
            self.time_left.begin(trainer.iteration)
            self.meter = IntervalMeter(
                self.plan.full_iters, self.device, self.mesh.world.size, self.peak
            )

    def went_back(self, trainer: Trainer) -> None:
        """Restart logging as a resumed process would."""
        self.meter = None
        self.writer.went_back(trainer.iteration, trainer.consumed_samples)
        self._mark_resume(trainer.iteration, trainer.consumed_samples)

    def after_step(self, trainer: Trainer, step: Step) -> None:
        assert self.meter is not None
        lengths = self.plan.lengths
        shorter = lengths.shorter(step.iteration - 1)
        shape = dataclasses.replace(self.shape, seq_length=step.seq_length, shorter=shorter)
        flops = shape.flops_per_step(step.samples, causal=True)
        flops += sum(extra(step) for extra in self.extra_flops)
        again = shape.recomputed_flops_per_token(
            self.recompute, causal=True, blocks=self.recomputed_blocks
        )
        recomputed = step.samples * step.seq_length * again
        across: torch.Tensor | float = 0.0
        if step.within is not None:
            tokens = step.samples * step.seq_length
            across = tokens * shape.scores_per_token() * (1 - step.within)
        blocks = self.recomputed_blocks or shape.num_layers
        share = min(1.0, blocks / shape.num_layers) if self.recompute else 0.0
        self.meter.add(step, flops - 3 * across, recomputed - share * across, lengths)
        self._bar.update()
        if self._early and not trainer.at_end:
            self._say_early(step)

    def record(
        self,
        name: str,
        value: Value,
        reduce: Reduce = "last",
        unit: str = "",
        over_ranks: bool = False,
    ) -> None:
        """Add a value to the next log line, as :meth:`IntervalMeter.record` does."""
        assert self.meter is not None, f"{name} is recorded before the first step"
        self.meter.record(name, value, reduce, unit, over_ranks)

    def _say_early(self, step: Step) -> None:
        """Print the time and losses of one of the first steps. Waits for the step."""
        values = {name: float(loss) for name, loss in step.result.losses.items()}
        losses = ", ".join(f"{name} {loss:.4g}" for name, loss in values.items())
        now = time.monotonic()
        seconds, self._last_step = now - self._last_step, now
        text = f"step {step.iteration}: {seconds:.3g} s, {losses}"
        self._early -= 1
        if not self._early:
            left = timedelta(seconds=round(seconds * (self.plan.train_iters - step.iteration)))
            text += f"; the other {self.plan.train_iters - step.iteration:,} take about {left}"
        self.say(text)

    @contextlib.contextmanager
    def paused(self, trainer: Trainer) -> Iterator[None]:
        """Report the interval if it ends at this step, and exclude the pause from the next one."""
        assert self.meter is not None
        if trainer.iteration % self.log_interval == 0 or trainer.at_end:
            trainer.settle()
            self._interval(self.meter, trainer)
        with self.meter.paused():
            yield

    def _interval(self, meter: IntervalMeter, trainer: Trainer) -> None:
        iteration, samples = trainer.iteration, trainer.consumed_samples
        metrics = meter.finish(
            iteration=iteration,
            consumed_samples=samples,
            consumed_tokens=self.plan.lengths.tokens(samples),
        )
        left = self.time_left.seconds(iteration, self.plan.train_iters)
        metrics.values["seconds_left"] = left
        for numbers in self.at_line:
            metrics.values.update(numbers(left))
        self.say(metrics.short_line() if self._brief else metrics.line().strip())
        self.event("train", iteration, samples, metrics.row())
        for write in self.after_line:
            write(self.writer)

    def evaluated(self, trainer: Trainer, evaluation: Reported) -> None:
        self.say(evaluation.line().strip())
        self.event(
            evaluation.kind, evaluation.iteration, trainer.consumed_samples, evaluation.row()
        )

    def wrote(self, trainer: Trainer, texts: WrittenTexts) -> None:
        self.writer.texts(
            texts,
            samples=trainer.consumed_samples,
            tokens=self.plan.lengths.tokens(trainer.consumed_samples),
        )

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        self._bar.close()
        for write in self.after_line:
            write(self.writer)
        if reason is not None:
            # This project's own launcher sets this variable without SIGINT, which it only forwards.
            handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGINT")
            loud = reason == "SIGINT" and "LOCAL_RANK" in os.environ and "SIGINT" in handled
            self.last_words = (
                "what follows is the launcher's, and says nothing about the run" * loud
            )
            self.say(f"stopped by {reason} after iteration {trainer.iteration}")

    def event(
        self, kind: str, iteration: int, samples: int, values: Mapping[str, float | None]
    ) -> None:
        """Write a row with metrics or an event. ``iteration`` and ``samples`` are its position."""
        tokens = self.plan.lengths.tokens(samples)
        self.writer.scalars(kind, iteration, values, samples=samples, tokens=tokens)

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        self._bar.close()
        self.writer.close()
        if self.last_words:
            self.say(self.last_words)  # after the last save has ended
