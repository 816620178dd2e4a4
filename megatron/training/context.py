"""A run as it comes to exist: what :func:`~megatron.training.build.build_trainer` has built so far,
for the features that take part in it."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any, TypeVar

import torch

from megatron.config import RunConfig
from megatron.data.build import DataFile
from megatron.data.loader import TrainingData
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.mesh import Mesh
from megatron.run.run import Run
from megatron.training.checkpoints import CheckpointManager
from megatron.training.plan import TrainingPlan
from megatron.training.report import Reporter
from megatron.training.resume import ResumePoint, ResumeSource
from megatron.training.stopping import NonFiniteGuard
from megatron.training.trainer import Callback

Kind = TypeVar("Kind", bound=Callback)


class Order(IntEnum):
    """When a callback is called, among those of a run; at their exits and at the end of a training
    the order is reversed. Those of one place are called as they were added."""

    CLOSE = auto()
    """Release the engine and the folder of checkpoints, after everything else has ended."""
    RECORD = auto()
    """Record how the run was started and how it ended."""
    SPEND = auto()
    """Count energy and cost."""
    LEAVE = auto()
    """End as after a fault if other nodes leave, after the last save."""
    CALLER = auto()
    """Callbacks of the caller of ``build_trainer``."""
    TEACH = auto()
    """Let a teacher take part in steps."""
    EVALUATE = auto()
    """Evaluate tasks."""
    STOP = auto()
    """Find out whether the training has to stop."""
    COMPARE = auto()
    """Compare the ranks' times, which log lines contain."""
    REPORT = auto()
    """Print and write metrics."""
    JUDGE = auto()
    """Judge steps: first finite, then close to earlier ones, then equal on all ranks."""
    SAVE_IN_MEMORY = auto()
    """Save between two checkpoints on disk."""
    SAVE = auto()
    """Save checkpoints."""
    RESTART = auto()
    """Tell the guardian of a rank about steps and saves."""
    FOLLOW = auto()
    """Follow the best evaluation, whose checkpoint is saved."""
    PROFILE = auto()
    """Record a profile of some steps."""


class RunContext:
    """The objects of a run. An attribute is set once, when ``build_trainer`` has built its value;
    the hook of a feature says which exist when it is called.

    Attributes:
        started: when the run began, by ``time.monotonic``, if that was before this process.
        data: of training, validation and test.
        files: of the data, as far as checkpoints record them.
        source: the checkpoint to start from.
        on_disk: the one that the flags name; ``source`` may be newer.
        engine: the model in training; before ``ready`` it has initial weights.
        origin: where the run starts.
        changed: lines about inputs that differ from those of the checkpoint's run.
        notes: what checkpoints keep in ``state.json`` besides the position, by name.
        guard: judges whether steps are finite.
        checks: each gets an iteration on every rank, and raises an error if the state after it is
            not to be used.
    """

    data: TrainingData
    plan: TrainingPlan
    files: list[DataFile]
    source: ResumeSource | None
    on_disk: ResumeSource | None
    engine: TrainEngine
    origin: ResumePoint
    report: Reporter
    guard: NonFiniteGuard
    checkpoints: CheckpointManager

    def __init__(self, run: Run, mesh: Mesh, device: torch.device) -> None:
        self.run, self.mesh, self.device = run, mesh, device
        self.started: float | None = None
        self.changed: list[str] = []
        self.notes: dict[str, Any] = {}
        self.checks: list[Callable[[int], None]] = []
        self._callbacks: list[tuple[Order, Callback]] = []

    @property
    def config(self) -> RunConfig:
        return self.run.config

    def add(self, order: Order, callback: Callback) -> None:
        """Add a callback to the training."""
        self._callbacks.append((order, callback))

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """All callbacks in their order."""
        ordered = sorted(self._callbacks, key=lambda each: each[0])
        return tuple(callback for _, callback in ordered)

    def added(self, kind: type[Kind]) -> Kind:
        """Return the callback of a class that was added."""
        (callback,) = (each for _, each in self._callbacks if isinstance(each, kind))
        return callback

    def check(self, iteration: int) -> None:
        """Raise an error, on every rank, if the state after an iteration must not be used."""
        for check in self.checks:
            check(iteration)

    def newest_shown(self) -> str:
        """Return a description of the run's newest complete checkpoint; every rank must call it."""
        return self.checkpoints.newest_shown
