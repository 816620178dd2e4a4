"""The training loop: reads batches, runs steps and evaluations, and calls callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data.gpt_batch import GPTBatch, share_within_documents
from megatron.data.loader import MicroBatches, StalledDataError, TrainingData
from megatron.engine.train_engine import StepResult, TrainEngine
from megatron.parallel.mesh import Mesh
from megatron.training.metrics import Evaluation, Reported
from megatron.training.plan import TrainingPlan
from megatron.training.registry import WrittenTexts
from megatron.util.phases import ending, moved, phase
from megatron.util.progress import counted, progress_bar


@dataclass(frozen=True)
class Position:
    """Progress of a training run: the numbers of completed optimizer steps and consumed samples."""

    iteration: int = 0
    consumed_samples: int = 0


class StepCounts(NamedTuple):
    """Token counts of a step over all data-parallel ranks; float64 scalars on the device.

    Attributes:
        fed: number of tokens that the model reads, including padding.
        trained: number of tokens that contribute to the loss.
    """

    fed: Tensor
    trained: Tensor


@dataclass(frozen=True)
class Step:
    """Optimizer step, completed or queued on the device.

    Attributes:
        iteration: number of the step, counted from 1.
        first_sample: number of samples in all earlier steps.
        counts: token counts, if they differ from step to step.
        within: share of token pairs that are in the same document, over this rank's samples; None
            if attention crosses documents.
    """

    result: StepResult
    iteration: int
    first_sample: int
    samples: int
    seq_length: int
    learning_rate: float
    weight_decay: float
    counts: StepCounts | None = None
    within: Tensor | None = None


class GoBack(Exception):  # noqa: N818  # no error: a decision
    """Raised by a callback, on all ranks at the same point, to continue training from an earlier
    step. ``to`` restores the model and the trainer to that step."""

    def __init__(self, to: Callable[[Trainer], None]) -> None:
        super().__init__()
        self.to = to


class Callback:
    """Base class for what happens around training steps: logging, checkpoints, guards, profiles. A
    callback is entered before the first step and exited after the last evaluation or an error.
    Exits and ``training_ended`` run in reverse order of the callbacks. Every method is called on
    every rank, so it may communicate with the other ranks."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        """Release resources. ``error_type`` is the type of an error that ended training."""

    def before_step(self, trainer: Trainer) -> None:
        """Called before a step is queued."""

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Called after a step is queued. Reading the step's numbers waits for the device."""

    def settle(self, trainer: Trainer) -> None:
        """Wait for the steps so far, and raise an error if one was bad. Called before steps are
        logged, saved or evaluated, and at the end."""

    def paused(self, trainer: Trainer) -> contextlib.AbstractContextManager[Any]:
        """Return a context that surrounds the saves and evaluations between two steps."""
        return contextlib.nullcontext()

    def between_steps(self, trainer: Trainer) -> None:
        """Called between two steps, before evaluations, which take long and may be killed."""

    def reason_to_stop(self, trainer: Trainer) -> str | None:
        """Return a reason to stop after this step, as text after "stopped by", or None."""
        return None

    def went_back(self, trainer: Trainer) -> None:
        """Discard what concerns steps after ``trainer.iteration``, after a :class:`GoBack`."""

    def epoch_ended(self, trainer: Trainer, epoch: int) -> None:
        """Called after the last sample of an epoch (counted from 1), if the plan has epochs."""

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        """Called after the last step, before the final evaluations. ``reason`` tells why training
        stopped; it is None at the end of the plan."""

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        """Run the callback's own evaluations if due, and pass them to :meth:`Trainer.report`.
        Called after each validation, with ``last`` at the end of the plan."""

    def evaluated(self, trainer: Trainer, evaluation: Reported) -> None:
        """Called after an evaluation on held-out data or on a task."""

    def wrote(self, trainer: Trainer, texts: WrittenTexts) -> None:
        """Called after the model has generated sample texts for the user."""


class Trainer:
    """Trains one model: reads batches, runs steps and evaluations, and calls callbacks in their
    order. Callbacks do everything else, such as logging and saving.

    Args:
        num_workers: number of processes that prefetch training samples; 0 reads on demand.
        evaluated: whether an earlier start has already run the final evaluations.
    """

    def __init__(
        self,
        engine: TrainEngine,
        data: TrainingData,
        plan: TrainingPlan,
        callbacks: Sequence[Callback] = (),
        position: Position = Position(),  # noqa: B008  # frozen
        num_workers: int = 0,
        evaluated: bool = False,
    ) -> None:
        self._evaluated = evaluated
        self.engine, self.data, self.plan = engine, data, plan
        self.callbacks, self.num_workers = tuple(callbacks), num_workers
        self.iteration, self.consumed_samples = position.iteration, position.consumed_samples
        self._valid: dict[str, MicroBatches] = {}

    def fit(self) -> str | None:
        """Train to the end of the plan and run the final evaluations, or stop earlier if a callback
        requests it. Return the reason for stopping early, or None."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback)
            try:
                reason = None if self.plan.skip_train else self._train()
            except StalledDataError:
                self._end_training("data that do not come")
                raise
            ending()
            self._end_training(reason)
            if reason is None and not self._evaluated:
                self.validate()
                self._evaluate_otherwise(last=True)
                self.test()
        return reason

    def _end_training(self, reason: str | None) -> None:
        for callback in reversed(self.callbacks):
            callback.training_ended(self, reason)

    def _train(self) -> str | None:
        reason = None
        began = False
        while not self.at_end and reason is None:
            back = None
            with contextlib.closing(self._training_batches()) as batches:
                try:
                    while not self.at_end and reason is None:
                        # The first step compiles the model and starts reading data.
                        with phase("step" if began else "start"):
                            moved(self.iteration + 1)
                            self.step(batches)
                            reason = self._between_steps()
                        began = True
                    self.settle()
                except GoBack as decision:
                    back = decision.to
            if back is not None:
                reason = None
                back(self)
                self._valid.clear()
                self._tell("went_back")
        return reason

    def _training_batches(self) -> MicroBatches:
        train = self.data.datasets.train
        assert train is not None
        options = self.reading(consumed_samples=self.consumed_samples, num_workers=self.num_workers)
        return self.data.batches(train, **options)

    def step(self, batches: Iterator[Any]) -> None:
        """Run one optimizer step: train on the next micro batches, and call the callbacks."""
        self._tell("before_step")
        plan, first_sample = self.plan, self.consumed_samples
        rates = plan.rates(self.iteration, first_sample)
        rate, decay = rates[:2]
        length = plan.lengths.at(self.iteration)
        batches = plan.lengths.cut(batches, self.iteration)
        micro_batches = plan.batch_size.micro_batches(first_sample)
        counts = None
        if self.data.weighed:
            mesh, device = self.engine.mesh, self.engine.device
            batches, counts = weighed_step(batches, micro_batches, mesh, device)
        shares: list[Tensor] = []
        batches = _watched(batches, length, shares)
        result = self.engine.train_step(batches, micro_batches, first_sample, *rates)
        samples = plan.batch_size.batch_size(first_sample)
        self.iteration += 1
        self.consumed_samples += samples
        within = torch.stack(shares).mean() if shares else None
        step = Step(
            result, self.iteration, first_sample, samples, length, rate, decay, counts, within
        )
        self._tell("after_step", step)

    def _between_steps(self) -> str | None:
        """Save and evaluate if due. Return a callback's reason to stop, or None."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.paused(self))
            self._tell("between_steps")
            if self.plan.evaluates_after(self.iteration):
                self.validate()
            if not self.at_end:
                self._evaluate_otherwise(last=False)
            for epoch in self.plan.epochs_ended(self.iteration):
                self._tell("epoch_ended", epoch)
            reasons = [callback.reason_to_stop(self) for callback in self.callbacks]
        return next((reason for reason in reasons if reason is not None), None)

    def settle(self) -> None:
        """Wait for all steps so far. Raises TrainingStopped if one was bad."""
        self._tell("settle")

    @property
    def at_end(self) -> bool:
        """True if the plan has no further step."""
        return self.iteration >= self.plan.train_iters

    def evaluate(self) -> None:
        """Run the evaluations that are due after some steps, regardless of the step."""
        self.validate()
        self._evaluate_otherwise(last=False)

    def _evaluate_otherwise(self, last: bool) -> None:
        with phase("evaluation"):
            self._tell("evaluate", last)

    def validate(self) -> None:
        """Evaluate on the next samples of each validation set."""
        self.settle()
        for name, dataset in self.data.datasets.valid.items():
            if name not in self._valid:
                consumed = self.plan.valid_samples_before(self.iteration)
                options = self.reading(consumed_samples=consumed)
                self._valid[name] = self.data.batches(dataset, **options)
            self._evaluate(self._valid[name], name)

    def test(self) -> None:
        """Evaluate on each test set."""
        for name, dataset in self.data.datasets.test.items():
            self._evaluate(self.data.batches(dataset, **self.reading()), name, test=True)

    def evaluations(self, test: bool) -> Iterator[Evaluation]:
        """Yield the current weights' losses on the samples of the last validation, without
        reporting them. With ``test``, also yield the losses on the test sets."""
        consumed = self.plan.valid_samples_before(self.iteration)
        for name, dataset in self.data.datasets.valid.items():
            options = self.reading(consumed_samples=consumed)
            yield from self._losses(self.data.batches(dataset, **options), name)
        for name, dataset in self.data.datasets.test.items() if test else ():
            yield from self._losses(self.data.batches(dataset, **self.reading()), name, test=True)

    def _evaluate(self, batches: MicroBatches, name: str, test: bool = False) -> None:
        for evaluation in self._losses(batches, name, test):
            self.report(evaluation)

    def _losses(self, batches: MicroBatches, name: str, test: bool = False) -> Iterator[Evaluation]:
        if self.plan.eval_micro_batches == 0:
            return
        count = self.plan.eval_micro_batches
        supply: Iterator[Any] = batches
        if self.data.weighed and self.engine.mesh.pipeline.size > 1:
            # A pipeline needs batches with the same shape. Token ids take little memory.
            supply = iter(of_one_length([next(batches) for _ in range(count)]))
        with phase("evaluation", name), progress_bar(name, total=count, unit=" batches") as bar:
            losses = self.engine.evaluate(counted(supply, bar), count)
        spec, total = self.engine.spec, None
        if spec.no_perplexity and losses.keys() == spec.losses.keys():
            total = spec.total(losses, but=spec.training_only)
        yield Evaluation(self.iteration, losses, name, test, spec.no_perplexity, total)

    def report(self, evaluation: Reported) -> None:
        """Pass an evaluation to every callback."""
        self._tell("evaluated", evaluation)

    def show(self, texts: WrittenTexts) -> None:
        """Pass texts that the model has generated to every callback."""
        self._tell("wrote", texts)

    def reading(self, **options: Any) -> dict[str, Any]:
        """Return this rank's arguments for ``TrainingData.batches``, with ``options`` added."""
        data = self.engine.mesh.samples
        return {
            "micro_batch_size": self.plan.micro_batch_size,
            "data_rank": data.rank,
            "data_size": data.size,
            "device": self.engine.device,
            **options,
        }

    def _tell(self, what: str, *about: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, what)(self, *about)


def _watched(batches: Iterator[Any], length: int, shares: list[Tensor]) -> Iterator[Any]:
    """Yield the batches, and append each one's share of token pairs in documents to ``shares``."""
    for batch in batches:
        if isinstance(batch, GPTBatch) and batch.document_ids_BS is not None:
            shares.append(share_within_documents(batch.document_ids_BS, length))
        yield batch


def weighed_step(
    batches: Iterator[Any], count: int, mesh: Mesh, device: torch.device
) -> tuple[Iterator[Any], StepCounts]:
    """Return the next ``count`` micro batches of this rank, with weights divided by their mean over
    data-parallel ranks, and the step's token counts. Collective. Does not wait for the device."""
    step = [next(batches) for _ in range(count)]
    if mesh.pipeline.size > 1:
        step = of_one_length(step)
    fed = sum(batch.tokens_BS.numel() for batch in step)
    weights = [batch.weights_2.to(device, non_blocking=True) for batch in step]
    # Filled on the device: a copy from the CPU would wait for it.
    sums_3 = torch.full((3,), float(fed), dtype=torch.float64, device=device)
    sums_3[1:] = torch.stack(weights).sum(0)
    if mesh.samples.size > 1:
        dist.all_reduce(sums_3, group=mesh.samples.handle)
    means_2 = (sums_3[1:] / (count * mesh.samples.size)).clamp(min=torch.finfo(torch.float64).tiny)
    relative = (
        batch._replace(weights_2=own / means_2) for batch, own in zip(step, weights, strict=True)
    )
    return relative, StepCounts(sums_3[0], sums_3[2])


def of_one_length(batches: list[Any]) -> list[Any]:
    """Return the batches, all padded to the sequence length of the longest."""
    longest = max(batch.tokens_BS.shape[1] for batch in batches)
    return [batch.lengthened(longest) for batch in batches]
