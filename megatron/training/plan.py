"""Training plan: batch sizes, rates and lengths as functions of a run's progress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from megatron.config import ConfigError, RunConfig
from megatron.config.features import first_answer
from megatron.config.optimizer import OptimizerConfig
from megatron.config.training import TrainingConfig
from megatron.data.pipeline import sequence_lengths
from megatron.training.schedules import BatchSizeSchedule, LearningRateSchedule, WeightDecaySchedule


@dataclass(frozen=True)
class Epochs:
    """Length of a training in epochs over a data set."""

    count: int
    samples: int
    """Number of samples in the data set."""


class TrainingPlan:
    """Batch sizes, learning rate, weight decay, sequence lengths and length of a run. ``epochs``
    replaces ``--train-iters`` and similar flags. Batches can span two epochs; the last batch is
    filled with samples of a further epoch. Raises ConfigError if the schedules' values contradict
    each other, or if the run has no step.

    Attributes:
        train_iters: number of steps after which the run ends.
        rate_factor: factor of the learning rates of the next step.
        full_iters: number of steps by ``--train-iters`` or ``--train-samples``, for which data are
            prepared; more than ``train_iters`` if ``--train-tokens`` ends the run earlier.
    """

    def __init__(self, config: RunConfig, epochs: Epochs | None = None) -> None:
        self.epochs, self.rate_factor = epochs, 1.0
        training, optimizer = config.training, config.optimizer
        self.micro_batch_size = training.micro_batch_size
        self.global_batch_size = training.global_batch_size
        self.seq_length = config.model.seq_length
        self.skip_train = training.skip_train
        self.eval_interval, self.eval_iters = training.eval_interval, training.eval_iters
        self._replicas = config.parallel.data_parallel_size
        self.batch_size: BatchSizeSchedule = first_answer(lambda f: f.batch_sizes(config)) or (
            BatchSizeSchedule(self.global_batch_size, self.micro_batch_size, self._replicas)
        )
        self.lengths = sequence_lengths(config, self.batch_size.samples)
        length = self._set_length(training)
        self.learning_rate = self._learning_rate(optimizer, max(1, length))
        self.decoupled_rate: LearningRateSchedule | None = None
        if (rates := optimizer.own_rates) is not None:
            self.decoupled_rate = replace(self.learning_rate, lr=rates[0], min_lr=rates[1])
        self.weight_decay = WeightDecaySchedule(
            optimizer.start_weight_decay,
            optimizer.end_weight_decay,
            optimizer.weight_decay_incr_style,
            max(1, length),
        )

    def _set_length(self, training: TrainingConfig) -> int:
        """Set the numbers of steps of run and data. Return the length in ``self.unit``."""
        self.unit, length = training.length
        if self.epochs is not None:
            self.unit, length = "samples", self.epochs.count * self.epochs.samples
        length = length or 0
        samples = self.lengths.samples(length) if self.unit == "tokens" else length
        in_full = self.epochs is not None
        self.full_iters = length if self.unit == "iters" else self._steps(samples, in_full)
        self.train_iters = self.full_iters
        self.ends_by_tokens = self.epochs is None and training.tokens_end_the_run
        if self.ends_by_tokens:
            samples = self.lengths.samples(training.train_tokens or 0)
            self.train_iters = min(self.full_iters, self._steps(samples, in_full=True))
        if self.train_iters == 0 and not training.skip_train:
            raise ConfigError(
                f"--train-{self.unit} {length} is less than one step takes: "
                f"{self.batch_size.batch_size(0)} samples of {self.lengths.at(0)} tokens"
            )
        return length

    def _steps(self, samples: int, in_full: bool) -> int:
        """Return the steps within ``samples``, or the fewest that consume all if ``in_full``."""
        steps = self.batch_size.iterations(samples)
        return steps + (in_full and self.batch_size.samples(steps) < samples)

    def _learning_rate(self, optimizer: OptimizerConfig, length: int) -> LearningRateSchedule:
        self._warmup_unit, self._decay_unit = optimizer.schedule_units(self.unit)
        warmup: int = getattr(optimizer, f"lr_warmup_{self._warmup_unit}")
        mixed = self._warmup_unit != self._decay_unit
        # As in Megatron-DeepSpeed, a warm-up in tokens does not postpone a decay in steps.
        start = 0 if self._warmup_unit == "tokens" else self._tokens_after(warmup)
        return LearningRateSchedule(
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            init_lr=optimizer.lr_warmup_init,
            style=optimizer.lr_decay_style,
            warmup=warmup,
            decay=getattr(optimizer, f"lr_decay_{self._decay_unit}") or length,
            wsd_decay=getattr(optimizer, f"lr_wsd_decay_{self._decay_unit}"),
            wsd_style=optimizer.lr_wsd_decay_style,
            unit=self._decay_unit,
            warmup_unit=self._warmup_unit if mixed else None,
            start=start if mixed else 0,
            exponent=optimizer.lr_power_exponent,
            timescale=optimizer.lr_power_timescale,
        )

    def _tokens_after(self, warmup: int) -> int:
        """Return the number of tokens in a warm-up whose length is in iterations or samples."""
        of_steps = self._warmup_unit == "iters"
        return self.lengths.tokens(self.batch_size.samples(warmup) if of_steps else warmup)

    def rates(self, iteration: int, consumed_samples: int) -> tuple[float, ...]:
        """Return the learning rate and weight decay for the step after ``iteration`` steps, and the
        rate of ``--decoupled-lr`` as a third value if it is set."""
        at = {
            unit: self.progress(iteration, consumed_samples, unit)
            for unit in {self.unit, self._warmup_unit, self._decay_unit}
        }
        done = at[self._decay_unit], at[self._warmup_unit]
        rate, decay = self.rate_factor * self.learning_rate(*done), self.weight_decay(at[self.unit])
        if self.decoupled_rate is None:
            return rate, decay
        return rate, decay, self.rate_factor * self.decoupled_rate(*done)

    def progress(self, iteration: int, consumed_samples: int, unit: str | None = None) -> int:
        """Return the run's progress in ``unit``, by default the unit of its length."""
        return {
            "iters": iteration,
            "samples": consumed_samples,
            "tokens": self.lengths.tokens(consumed_samples),
        }[unit or self.unit]

    def evaluates_after(self, iteration: int) -> bool:
        """Return whether an evaluation is due after this step, apart from that at the run's end."""
        return iteration % self.eval_interval == 0 and iteration < self.train_iters

    def epochs_ended(self, iteration: int) -> range:
        """Return the numbers, from 1, of the epochs whose last sample was consumed in this step."""
        if self.epochs is None:
            return range(0)
        before, after = (
            min(self.batch_size.samples(steps) // self.epochs.samples, self.epochs.count)
            for steps in (iteration - 1, iteration)
        )
        return range(before + 1, after + 1)

    def batch_sizes(self) -> list[tuple[int, int]]:
        """Return the run's successive batch sizes, each with its number of steps."""
        sizes, consumed = [], 0
        for _ in range(max(1, self.full_iters)):
            sizes.append(self.batch_size.batch_size(consumed))
            consumed += sizes[-1]
        return [(size, len(list(steps))) for size, steps in groupby(sizes)]

    @property
    def eval_micro_batches(self) -> int:
        """Number of micro batches per rank in one evaluation."""
        per_batch = self.global_batch_size // (self.micro_batch_size * self._replicas)
        return self.eval_iters * per_batch

    def valid_samples_before(self, iteration: int) -> int:
        """Return the number of validation samples that evaluations before the one at ``iteration``
        have read. Past the run's end, ``iteration`` stands for its last step."""
        evaluations = max(0, min(iteration, self.train_iters) - 1) // self.eval_interval
        return evaluations * self.eval_iters * self.global_batch_size

    @property
    def sample_counts(self) -> tuple[int, int, int]:
        """Number of training, validation and test samples that data sets must provide.
        ``--train-tokens`` does not reduce them, even if it ends the run earlier."""
        evaluation = self.eval_iters * self.global_batch_size
        evaluations = self.full_iters // self.eval_interval + 1
        train = self.batch_size.samples(self.full_iters)
        return train, evaluations * evaluation, evaluation
