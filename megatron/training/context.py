"""Objects of a run, which :func:`~megatron.training.build.build_trainer` creates one by one.
Features that take part in the run get them."""

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
    """Position of a callback among a run's callbacks. Exits and the end of training use the reverse
    order. Callbacks with the same position keep the order in which they were added."""

    CLOSE = auto()
    """Release the engine and the checkpoint folder, after everything else has ended."""
    RECORD = auto()
    """Record how the run started and ended."""
    SPEND = auto()
    """Measure energy and cost."""
    LEAVE = auto()
    """End the run as after a fault if other nodes leave, after the last save."""
    CALLER = auto()
    """Callbacks passed to ``build_trainer``."""
    TEACH = auto()
    """Add a teacher model's outputs to steps."""
    EVALUATE = auto()
    """Evaluate on tasks."""
    STOP = auto()
    """Determine whether the training has to stop."""
    COMPARE = auto()
    """Compare the ranks' step times, for log lines."""
    REPORT = auto()
    """Print and write metrics."""
    JUDGE = auto()
    """Check that each step is finite, close to earlier ones, and equal on all ranks."""
    SAVE_IN_MEMORY = auto()
    """Save in host memory between two checkpoints on disk."""
    SAVE = auto()
    """Save checkpoints."""
    RESTART = auto()
    """Report steps and saves to the process that guards a rank and can restart it."""
    FOLLOW = auto()
    """Track the best evaluation and save its checkpoint."""
    PROFILE = auto()
    """Record a profile of some steps."""


class RunContext:
    """Objects of a run. ``build_trainer`` sets each attribute once, when the object exists. Each
    feature hook documents which attributes are set when it is called.

    Attributes:
        started: start of the run by ``time.monotonic``, if it began before this process; else None.
        data: training, validation and test data.
        files: data files that are recorded in checkpoints.
        source: checkpoint to start from.
        on_disk: checkpoint that the flags select; ``source`` may be newer.
        engine: model in training. It has initial weights until a checkpoint is loaded.
        origin: state from which the run starts.
        changed: lines about inputs that differ from those of the checkpoint's run.
        notes: values by name that ``state.json`` in checkpoints stores besides the position.
        guard: checks whether steps are finite.
        checks: called on every rank with an iteration; raise if its state must not be used.
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
        """Add a callback at a position."""
        self._callbacks.append((order, callback))

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """All callbacks, in the order in which they are called."""
        ordered = sorted(self._callbacks, key=lambda each: each[0])
        return tuple(callback for _, callback in ordered)

    def added(self, kind: type[Kind]) -> Kind:
        """Return the callback of class ``kind``, of which exactly one must have been added."""
        (callback,) = (each for _, each in self._callbacks if isinstance(each, kind))
        return callback

    def check(self, iteration: int) -> None:
        """Raise an error, on every rank, if the state after an iteration must not be used."""
        for check in self.checks:
            check(iteration)

    def newest_shown(self) -> str:
        """Return a text that names the newest complete checkpoint. Collective."""
        return self.checkpoints.newest_shown
