"""When a run compares its replicas, and how it ends when they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.engine.train_engine import TrainEngine
from megatron.training.trainer import Callback, Trainer
from megatron.util.errors import FaultError

if TYPE_CHECKING:
    from megatron.features.resilience.replicas import Replicas


class ReplicaCheck(Callback):
    """Compares what several ranks have copies of: before every save, and after every ``interval``
    steps; never with 0. ``newest`` says on every rank which checkpoint is the last good one."""

    def __init__(
        self,
        engine: TrainEngine,
        interval: int | None = None,
        newest: Callable[[], str] = lambda: "there is no earlier checkpoint",
    ) -> None:
        self._engine, self._interval, self._newest = engine, interval, newest
        self._replicas: Replicas | None = None
        self._equal_after: int | None = None

    def between_steps(self, trainer: Trainer) -> None:
        """Compares if it is due."""
        if self._interval and trainer.iteration % self._interval == 0:
            trainer.settle()  # a step that was not finite is named first
            self.check(trainer.iteration)

    def went_back(self, trainer: Trainer) -> None:
        self._equal_after = None

    def check(self, iteration: int) -> None:
        """Raises FaultError, on every rank, if copies differ after so many steps; once for each."""
        if self._interval == 0 or self._equal_after == iteration:
            return
        if self._replicas is None:
            from megatron.features.resilience.replicas import Replicas

            self._replicas = Replicas(self._engine)
        found = self._replicas.difference()
        if found is not None:
            raise FaultError(
                f"after iteration {iteration} what several ranks have copies of differs: {found}; "
                "a processor or its memory has changed numbers, or ranks have not computed the "
                f"same: {self._newest()}, and this state is not saved; if it comes again on the "
                "same machine, leave that out"
            )
        self._equal_after = iteration
