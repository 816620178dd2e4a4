"""A training with a teacher."""

from __future__ import annotations

from megatron.data.loader import TrainingData
from megatron.engine.train_engine import TrainEngine
from megatron.objectives.teacher import find_teacher
from megatron.training.run import Run
from megatron.training.trainer import Callback, Trainer


class Distillation(Callback):
    """Brings the teacher of a run into its steps, for as many of them as ``--kd-iters`` says.
    Raises ConfigError or CheckpointError, before anything that takes time, if there is none or its
    model cannot teach this one."""

    def __init__(self, run: Run) -> None:
        self._flags = run.config.distillation
        self._found = find_teacher(run.config, run.tokenizer.vocab_size)

    def start(self, engine: TrainEngine, data: TrainingData) -> None:
        """Loads the teacher, and makes it teach the model of ``engine``."""
        self._teacher = self._found.start(engine.mesh, engine.device)
        engine.teach = self._teacher.teach

    def before_step(self, trainer: Trainer) -> None:
        last = self._flags.kd_iters
        self._teacher.active = last is None or trainer.iteration < last
