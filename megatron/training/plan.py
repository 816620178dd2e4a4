"""Batch sizes, learning rate and lengths of a run as functions of the consumed samples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from megatron.config import ConfigError, RunConfig
from megatron.data.pipeline import sequence_lengths
from megatron.training.batch_size import BatchSizeSchedule
from megatron.training.schedules import LearningRateSchedule, WeightDecaySchedule


@dataclass(frozen=True)
class Epochs:
    """A training that goes over a data set several times."""

    count: int
    samples: int
    """Samples of the data set."""


class TrainingPlan:
    """Batch sizes, learning rate, weight decay, lengths and positions of a run; with ``epochs``
    instead of ``--train-iters`` and the like. Batches cross from one epoch into the next; the last
    one is filled up from the beginning of a further epoch. Rates are by :meth:`progress`. Raises
    ConfigError if the schedules' values contradict each other, or the run has no step."""

    def __init__(self, config: RunConfig, epochs: Epochs | None = None) -> None:
        self.epochs = epochs
        training, optimizer = config.training, config.optimizer
        self.micro_batch_size = training.micro_batch_size
        self.global_batch_size = training.global_batch_size
        self.seq_length = config.model.seq_length
        self.skip_train = training.skip_train
        self.eval_interval, self.eval_iters = training.eval_interval, training.eval_iters
        self.batch_size = BatchSizeSchedule(
            training.global_batch_size,
            training.micro_batch_size,
            config.parallel.data_parallel_size,
            training.rampup_batch_size,
        )
        self._replicas = config.parallel.data_parallel_size
        self.lengths = sequence_lengths(config, self.batch_size.samples)
        if epochs is not None:
            self.unit, length = "samples", epochs.count * epochs.samples
            self.train_iters = self.batch_size.iterations(length)
            self.train_iters += self.batch_size.samples(self.train_iters) < length
        elif training.train_samples is not None:
            self.unit, length = "samples", training.train_samples
            self.train_iters = self.batch_size.iterations(training.train_samples)
        elif training.train_tokens is not None:
            self.unit, length = "tokens", training.train_tokens
            samples = self.lengths.samples(training.train_tokens)
            self.train_iters = self.batch_size.iterations(samples)
        else:
            self.unit, length = "iters", training.train_iters or 0
            self.train_iters = length
        if self.train_iters == 0 and not training.skip_train:
            raise ConfigError(
                f"--train-{self.unit} {length} is less than one step takes: "
                f"{self.batch_size.batch_size(0)} samples of {self.lengths.at(0)} tokens"
            )
        decay = getattr(optimizer, f"lr_decay_{self.unit}") or max(1, length)
        self.learning_rate = LearningRateSchedule(
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            init_lr=optimizer.lr_warmup_init,
            style=optimizer.lr_decay_style,
            warmup=getattr(optimizer, f"lr_warmup_{self.unit}"),
            decay=decay,
            wsd_decay=getattr(optimizer, f"lr_wsd_decay_{self.unit}", None),
            wsd_style=optimizer.lr_wsd_decay_style,
            unit=self.unit,
        )
        self.weight_decay = WeightDecaySchedule(
            optimizer.start_weight_decay,
            optimizer.end_weight_decay,
            optimizer.weight_decay_incr_style,
            max(1, length),
        )

    def progress(self, iteration: int, consumed_samples: int) -> int:
        """How far the run is, in the unit of its length."""
        return {
            "iters": iteration,
            "samples": consumed_samples,
            "tokens": self.lengths.tokens(consumed_samples),
        }[self.unit]

    def evaluates_after(self, iteration: int) -> bool:
        """Whether that step is followed by an evaluation; the end of the run always is."""
        return iteration % self.eval_interval == 0 and iteration < self.train_iters

    def epochs_ended(self, iteration: int) -> range:
        """The epochs, from 1, whose last sample that step has consumed."""
        if self.epochs is None:
            return range(0)
        before, after = (
            min(self.batch_size.samples(steps) // self.epochs.samples, self.epochs.count)
            for steps in (iteration - 1, iteration)
        )
        return range(before + 1, after + 1)

    def batch_sizes(self) -> list[tuple[int, int]]:
        """The batch sizes of the run in turn: (size, number of steps)."""
        sizes, consumed = [], 0
        for _ in range(max(1, self.train_iters)):
            sizes.append(self.batch_size.batch_size(consumed))
            consumed += sizes[-1]
        return [(size, len(list(steps))) for size, steps in groupby(sizes)]

    @property
    def eval_micro_batches(self) -> int:
        """Micro batches of each rank in one evaluation."""
        per_batch = self.global_batch_size // (self.micro_batch_size * self._replicas)
        return self.eval_iters * per_batch

    def valid_samples_before(self, iteration: int) -> int:
        """Validation samples that earlier evaluations than the one at ``iteration`` have read; past
        the end of the run, earlier ones than its last."""
        evaluations = max(0, min(iteration, self.train_iters) - 1) // self.eval_interval
        return evaluations * self.eval_iters * self.global_batch_size

    @property
    def sample_counts(self) -> tuple[int, int, int]:
        """Samples needed for training, validation and test."""
        evaluation = self.eval_iters * self.global_batch_size
        evaluations = self.train_iters // self.eval_interval + 1
        train = self.batch_size.samples(self.train_iters)
        return train, evaluations * evaluation, evaluation
