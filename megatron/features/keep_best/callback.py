"""Tracking of the best evaluation of a run: its checkpoint is kept, and training can stop early if
no better one follows."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import BEST, tag
from megatron.config import ConfigError
from megatron.model.embedding import LM_LOSS
from megatron.parallel.mesh import Mesh
from megatron.training.checkpoints import CheckpointManager
from megatron.training.metrics import Evaluation, Reported
from megatron.training.trainer import Callback, Trainer
from megatron.util.files import write_whole
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)


class BestEvaluation(Callback):
    """Callback that tracks the validation loss, the mean over all validation sets. The evaluations
    so far are stored in ``best_epoch.json`` next to the checkpoints, so that a resumed run
    continues with them.

    Args:
        save: the folder of checkpoints; None if nothing is saved.
        keeps: True to save a checkpoint after every evaluation that is the best so far. The file
            names it, and ``--keep-last`` does not delete it.
        patience: number of consecutive evaluations without a lower loss after which training stops;
            None for never.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        mesh: Mesh,
        save: str | None,
        keeps: bool,
        patience: int | None,
        iteration: int,
    ) -> None:
        self._checkpoints, self._keeps, self._patience = checkpoints, keeps, patience
        self._path = Path(save) / BEST if save else None
        self._mesh, self._main = mesh, mesh.world.rank == 0
        self._now: dict[str, float] = {}
        self.losses: dict[int, float] = {}
        """Validation loss by the number of steps before the evaluation."""
        if iteration and self._path is not None:
            best = mesh.world.shared(self.read(self._path) if self._main else {})
            self.losses = {at: loss for at, loss in best.items() if at <= iteration}

    @staticmethod
    def read(path: Path) -> dict[int, float]:
        """Return the validation losses in a file by their steps, empty if the file does not exist.
        Raises ConfigError if the file is malformed."""
        if not path.is_file():
            return {}
        try:
            content = parse_json(path.read_bytes(), str(path), lenient=True)["evaluations"]
            return {
                each["iteration"]: math.nan if each["loss"] is None else float(each["loss"])
                for each in content
            }
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{path} cannot be read; delete it, and the best evaluation is found among those "
                "that follow"
            ) from None

    @property
    def best(self) -> int | None:
        """Number of steps before the first evaluation with the lowest loss, or None without
        evaluations."""
        return _best(self.losses)

    def evaluated(self, trainer: Trainer, evaluation: Reported) -> None:
        if isinstance(evaluation, Evaluation) and not evaluation.test:
            self._now[evaluation.name] = _minimised(trainer, evaluation)
        # Other kinds of evaluation may provide a value to minimise.
        elif (number := getattr(evaluation, "minimised", None)) is not None:
            self._now[evaluation.kind] = number

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        """Record the losses of a completed validation, and save a checkpoint if it is the best."""
        if not self._now:
            return
        mean = math.fsum(self._now.values()) / len(self._now)
        self._now = {}
        self.losses[trainer.iteration] = self._mesh.world.shared(mean)  # the same on all ranks
        if self._keeps and self.best == trainer.iteration:
            self._checkpoints.save(trainer.iteration, trainer.consumed_samples)
        self._write()

    def went_back(self, trainer: Trainer) -> None:
        self.losses = {at: loss for at, loss in self.losses.items() if at <= trainer.iteration}
        self._now.clear()
        self._write()

    def reason_to_stop(self, trainer: Trainer) -> str | None:
        patience, best = self._patience, self.best
        if patience is None or best is None or trainer.at_end:
            return None
        if not _is_over(self.losses, best, patience, trainer.iteration):
            return None
        return (
            f"--early-stopping-patience {patience}: the validation loss was lowest, "
            f"{self.losses[best]:.6f}, after iteration {best},"
        )

    def _write(self) -> None:
        if self._path is None or not self._main:
            return
        best = self.best
        content = {
            "iteration": best,
            "checkpoint": tag(best) if self._keeps and best is not None else None,
            "metric": "validation loss",
            "value": None if best is None else self.losses[best],
            "evaluations": [
                {"iteration": at, "loss": loss if math.isfinite(loss) else None}
                for at, loss in self.losses.items()
            ],
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:  # the next evaluation writes all losses again
            logger.warning("%s cannot be written: %s", self._path, error.strerror)


def stopped_early(save: Path, patience: int | None, iteration: int) -> bool:
    """Return whether ``--early-stopping-patience`` ended the run with checkpoints in ``save`` after
    this number of steps."""
    losses = {} if patience is None else BestEvaluation.read(save / BEST)
    best = _best(losses)
    return patience is not None and best is not None and _is_over(losses, best, patience, iteration)


def _best(losses: Mapping[int, float]) -> int | None:
    finite = {at: loss for at, loss in losses.items() if math.isfinite(loss)}
    return min(finite, key=finite.__getitem__, default=None)


def _is_over(losses: Mapping[int, float], best: int, patience: int, iteration: int) -> bool:
    return iteration in losses and sum(at > best for at in losses) >= patience


def _minimised(trainer: Trainer, evaluation: Evaluation) -> float:
    """Return the loss that training minimises, as evaluated, without terms that exist only in
    training."""
    spec = trainer.engine.spec
    values: dict[str, Any] = {
        name: weight * evaluation.losses[name]
        for name, weight in spec.losses.items()
        if weight and name in evaluation.losses and name not in spec.training_only
    }
    return math.fsum(values.values()) if values else evaluation.losses.get(LM_LOSS, math.nan)
