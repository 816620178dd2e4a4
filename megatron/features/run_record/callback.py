"""Writes the record of a run's start, and at the end how it ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.data.build import DataFile
from megatron.features.run_record.folder import StartRecord
from megatron.features.run_record.hosts import RankPlace
from megatron.parallel.mesh import Mesh
from megatron.run.run import Run
from megatron.training.report import say
from megatron.training.resume import ResumePoint
from megatron.training.trainer import Callback, Trainer
from megatron.util.errors import lost_output, one_line

logger = logging.getLogger(__name__)


class RunRecorder(Callback):
    """Writes the record of this start on the main process, for a run that saves. A folder that
    cannot be written does not end a run; that is said."""

    def __init__(
        self,
        run: Run,
        mesh: Mesh,
        begin: ResumePoint,
        files: Sequence[DataFile],
        places: Sequence[RankPlace],
    ) -> None:
        self._record: StartRecord | None = None
        self._iteration, self._reason = begin.iteration, "the end of its plan"
        if mesh.world.rank:
            return
        assert run.config.checkpoint.save is not None
        save = Path(run.config.checkpoint.save)
        try:
            self._record = StartRecord(save, run, begin, files, places)
        except OSError as error:
            logger.warning("the record of this start is missing: %s", one_line(error))
            return
        say(f"command, versions, code and data of this start: {self._record.folder}")

    def after_step(self, trainer: Trainer, step: object) -> None:
        self._iteration = trainer.iteration

    def went_back(self, trainer: Trainer) -> None:
        self._iteration = trainer.iteration

    def training_ended(self, trainer: Trainer, reason: str | None) -> None:
        if reason is not None:
            self._reason = reason

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if self._record is None:
            return
        if error_type is not None:
            self._reason = f"{error_type.__name__}: {error[0]}"
        try:
            reason = "; ".join([self._reason, *lost_output()])
            self._record.end(self._iteration, reason)
        except OSError as failure:
            logger.warning("%s: %s", self._record.folder, one_line(failure))
