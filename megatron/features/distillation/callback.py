"""Callback that adds a teacher to a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from megatron.config import ConfigError
from megatron.data.loader import TrainingData
from megatron.engine.train_engine import TrainEngine
from megatron.families import family_of
from megatron.features.distillation.flags import DistillationConfig
from megatron.features.distillation.objective import TaughtBatch
from megatron.features.distillation.teacher import (
    Sampled,
    Teacher,
    TeacherCache,
    find_teacher,
    identity_of,
)
from megatron.run.run import Run
from megatron.training.plan import TrainingPlan
from megatron.training.trainer import Callback, Step, Trainer
from megatron.util.processes import return_freed_memory


class Distillation(Callback):
    """Callback that trains the model with a teacher in the first ``--kd-iters`` steps of a run.
    Raises ConfigError or CheckpointError, before any slow work, if the teacher is missing or
    unsuitable for this model.

    Attributes:
        teacher: the teacher; None if its outputs come from ``--kd-cache``.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._flags = run, run.config.section(DistillationConfig)
        self._found = find_teacher(run.config, run.tokenizer.vocab_size)
        self.teacher: Teacher | None = None
        self._cache: TeacherCache | None = None
        self._active = True
        if self._flags.kd_cache is not None and run.config.model.family != "gpt":
            raise ConfigError(
                f"--kd-cache {self._flags.kd_cache}: samples of the family "
                f"{run.config.model.family} are not kept; leave it out"
            )

    def start(
        self, engine: TrainEngine, data: TrainingData, plan: TrainingPlan, consumed: int
    ) -> None:
        """Load the teacher, or its cached outputs, and attach it to the model of ``engine``, whose
        training has consumed ``consumed`` samples."""
        engine.teach = self.teach
        self._evaluates_otherwise = engine.spec.evaluated is not None
        parallel = engine.config.parallel
        # A process can have several pipeline stages, depending on the schedule.
        sequences = getattr(engine.model, "sequences", {parallel.stages - 1: None})
        self._has_head = parallel.stages - 1 in sequences
        if self._flags.kd_cache is None:
            self.teacher = self._found.start(engine.mesh, engine.device)
            return
        source = self._found.found.open(verify=False)
        identity = identity_of(source, self._flags.top_tokens, self._flags.kd_temp)
        self._cache = TeacherCache(self._flags.kd_cache, identity, data.collate)
        missing = self._cache.missing(self._samples(data, plan, consumed), engine.mesh)
        if missing:
            teacher = self._found.start(engine.mesh, engine.device, in_step=False)
            self._cache.fill(teacher, missing, plan.micro_batch_size)
            del teacher
            return_freed_memory()
            if engine.device.type == "cuda":
                torch.cuda.empty_cache()

    def _samples(self, data: TrainingData, plan: TrainingPlan, consumed: int) -> Iterator[Sampled]:
        """Yield the samples of this run for which a loss needs the teacher's outputs."""
        steps = min(plan.train_iters, self._flags.kd_iters or plan.train_iters)
        wanted, evaluated, tested = plan.sample_counts
        train, last = data.datasets.train, plan.batch_size.samples(steps)
        if train is not None:
            yield Sampled(train, range(consumed, min(len(train), wanted, last)))
        if self._evaluates_otherwise:
            return
        for sets, count in ((data.datasets.valid, evaluated), (data.datasets.test, tested)):
            for dataset in sets.values():
                yield Sampled(dataset, range(min(len(dataset), count)))

    def before_step(self, trainer: Trainer) -> None:
        last = self._flags.kd_iters
        self._active = last is None or trainer.iteration < last

    def went_back(self, trainer: Trainer) -> None:
        """Fill ``--kd-cache`` again, because it may lack some of the next samples."""
        if self._cache is not None:
            self.start(trainer.engine, trainer.data, trainer.plan, trainer.consumed_samples)

    def teach(self, batches: Iterator[Any], count: int) -> Iterator[TaughtBatch]:
        """Yield ``count`` micro batches, with the teacher's outputs until ``--kd-iters``."""
        if not self._active:
            return (TaughtBatch(next(batches)) for _ in range(count))
        if self._cache is not None:
            return self._cache.teach(batches, count, self._has_head)
        assert self.teacher is not None
        return self.teacher.teach(batches, count)

    def flops(self, step: Step) -> float:
        """Return the FLOPs of the teacher in a step. It only runs the forward pass, which takes a
        third of the FLOPs of training."""
        if self.teacher is None or not self._active:
            return 0.0
        config = self._found.config
        shape = family_of(config.model.family).shape(config.model, config)
        shape = dataclasses.replace(shape, seq_length=step.seq_length)
        return shape.flops_per_step(step.samples, causal=True) / 3
