"""The training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.data.build import Datasets
from megatron.data.curriculum.truncation import cut
from megatron.data.loader import MicroBatches
from megatron.data.samples import SampleDataset
from megatron.engine.build import build_engine
from megatron.engine.deepspeed_folder import checkpoint_writer
from megatron.engine.environment import training_device
from megatron.engine.saving import hold_folder
from megatron.model.spec import ModelSpec
from megatron.parallel.mesh import Mesh
from megatron.training import resume
from megatron.training.metrics import EvaluationMetrics, StepMetrics
from megatron.training.plan import TrainingPlan
from megatron.training.profiling import start_profiling
from megatron.training.report import Reporter, say
from megatron.training.run import Run
from megatron.training.saves import Saves
from megatron.training.signals import StopRequest
from megatron.training.watch import StepWatch, StopAgreement, TrainingStopped

__all__ = ["Trainer", "TrainingStopped"]


class Trainer:
    """Trains one model: batches in, steps, evaluations, log lines and checkpoints out.

    Args:
        run: what was asked for.
        program: the model, its inputs and its loss.
        datasets: training, validation and test data.
        collate: makes a batch of samples.
        mesh: the layout's process groups.
    """

    def __init__(
        self,
        run: Run,
        program: ModelSpec,
        datasets: Datasets,
        collate: Any,
        mesh: Mesh,
    ) -> None:
        self.run, self.config = run, run.config
        self.datasets, self.collate, self.mesh = datasets, collate, mesh
        self.stop = StopRequest(run.config.training.exit_duration_in_mins, run.launched)
        self.device = training_device()
        self.plan = TrainingPlan(self.config)
        save = self.config.checkpoint.save
        self.lock = hold_folder(save, mesh.world, self.device, say)
        checkpoint = resume.locate(self.config.checkpoint)
        self.engine = build_engine(self.config, run.content, program, mesh, self.device)
        writer = checkpoint_writer(self.engine, run.content, run.tokenizer.save_pretrained)
        begin = resume.load(self.engine, self.plan, checkpoint)
        self.iteration, self.consumed_samples = begin.iteration, begin.consumed_samples
        self._valid: dict[str, MicroBatches] = {}
        self.report = Reporter(run, self.plan, mesh, self.device, begin)
        self.saves = Saves(writer, self.report)
        self.meter = self.report.meter()
        check = run.config.training.check_for_nan_in_loss_and_grad
        self.watch = StepWatch(self.device, run.config.precision.fp16, check)
        self.agreement = StopAgreement(self.device, mesh.world.size)

    def fit(self) -> None:
        """Trains to the end of the plan, or until it is asked to stop; then tests.

        Raises:
            TrainingStopped: the loss or the gradients are not finite.
            CheckpointError: the last save failed.
        """
        with self.stop, contextlib.closing(self.report):
            with contextlib.closing(self.saves):
                with start_profiling(self.config, self.engine, self.saves, self.iteration):
                    reason = None if self.config.training.skip_train else self._train()
                if reason is None:
                    self._evaluate_at_end()
                else:
                    self.report.say(f"stopped by {reason} after iteration {self.iteration}")
            self.saves.check_last()
        if self.lock is not None:
            self.lock.release()
        # Not after an error: it waits for the device, and the device perhaps for another rank.
        self.engine.close()

    def _train(self) -> str | None:
        """Steps until the end; returns why it ended early, if it did."""
        assert self.datasets.train is not None
        workers = self.config.data.num_workers
        batches = self._batches(self.datasets.train, self.consumed_samples, workers)
        with contextlib.closing(batches):
            return self._steps(batches)

    def _steps(self, batches: MicroBatches) -> str | None:
        self.meter = self.report.meter()
        reason = None
        while self.iteration < self.plan.train_iters and reason is None:
            self._step(batches)
            self.saves.tell_finished()
            logging = self.config.logging
            if self.iteration % logging.log_interval == 0 or self._at_end():
                self.watch.look(at_all=True)
                self.report.interval(self.meter, self.iteration, self.consumed_samples)
            with self.meter.paused():
                # Saved before it is evaluated: an evaluation is long, and may not be survived.
                if self._due(self.config.checkpoint.save_interval) or self._at_end():
                    self._save()
                if self._due(self.config.training.eval_interval) and not self._at_end():
                    self._evaluate()
                reason = self._reason_to_stop()
                if reason is not None:
                    self._save()
        return reason

    def _step(self, batches: Iterator[Any]) -> None:
        plan, consumed = self.plan, self.consumed_samples
        progress = plan.progress(self.iteration, consumed)
        rate, decay = plan.learning_rate(progress), plan.weight_decay(progress)
        samples = plan.batch_size.batch_size(consumed)
        micro_batches = plan.batch_size.micro_batches(consumed)
        length = plan.lengths.at(self.iteration)
        if length < plan.seq_length:
            batches = cut(batches, length)
        result = self.engine.train_step(batches, micro_batches, consumed, rate, decay)
        self.iteration += 1
        self.consumed_samples += samples
        self.watch.add(result, self.iteration, consumed, samples)
        self.meter.add(
            StepMetrics(
                loss=result.loss,
                samples=samples,
                tokens=samples * length,
                flops=self.report.step_flops(samples, length),
                seq_length=length if plan.lengths.grows else None,
                learning_rate=rate,
                weight_decay=decay,
                grad_norm=result.grad_norm,
                loss_scale=result.loss_scale,
                skipped=result.skipped,
            )
        )

    def _at_end(self) -> bool:
        return self.iteration >= self.plan.train_iters

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.iteration % interval == 0

    def _reason_to_stop(self) -> str | None:
        if self._due(self.config.training.exit_interval) and not self._at_end():
            return f"--exit-interval {self.config.training.exit_interval}"
        asked = self.stop.requested
        if self.agreement.reached(asked is not None, self._at_end()):
            return asked or "a request to another rank"
        return None

    def _batches(self, dataset: SampleDataset[Any], consumed: int, workers: int) -> MicroBatches:
        return MicroBatches(
            dataset,
            self.collate,
            micro_batch_size=self.plan.micro_batch_size,
            data_rank=self.mesh.data.rank,
            data_size=self.mesh.data.size,
            consumed_samples=consumed,
            num_workers=workers,
            device=self.device,
        )

    def _evaluate(self) -> None:
        """Mean loss over eval-iters global batches of each validation set; each evaluation reads on
        in the sets."""
        self.watch.look(at_all=True)
        for name, dataset in self.datasets.valid.items():
            if name not in self._valid:
                consumed = self.plan.valid_samples_before(self.iteration)
                self._valid[name] = self._batches(dataset, consumed, 0)
            self._evaluate_on(self._valid[name], name)

    def _evaluate_at_end(self) -> None:
        self._evaluate()
        for name, dataset in self.datasets.test.items():
            self._evaluate_on(self._batches(dataset, 0, 0), name, test=True)

    def _evaluate_on(self, batches: MicroBatches, name: str, test: bool = False) -> None:
        if self.config.training.eval_iters == 0:
            return
        losses = self.engine.evaluate(batches, self.plan.eval_micro_batches)
        loss = self.engine.spec.total(losses)
        metrics = EvaluationMetrics(self.iteration, loss, name, test)
        self.report.evaluation(metrics, self.consumed_samples)

    def _save(self) -> None:
        self.watch.look(at_all=True)  # never a step that is to be reported as bad
        self.saves.save(self.iteration, self.consumed_samples)
