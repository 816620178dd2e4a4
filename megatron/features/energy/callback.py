"""Counts what a run spends, and tells the log of it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import psutil
import torch

from megatron.config import RunConfig
from megatron.features.energy.meter import RunEnergy
from megatron.features.energy.totals import (
    Prices,
    Totals,
    read_totals,
    write_totals,
)
from megatron.parallel.mesh import Mesh
from megatron.training.metrics import Spending
from megatron.training.report import Reporter
from megatron.training.resume import ResumePoint
from megatron.training.trainer import Callback
from megatron.util.errors import one_line

logger = logging.getLogger(__name__)

_SECONDS = 10.0
"""Between two writes of the sums, which wait for the disk."""


class SpendingCounter(Callback):
    """Counts energy, and time of devices from the start of the processes; with a run that continues
    from a checkpoint also what its starts before spent, steps that were lost included."""

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        device: torch.device,
        report: Reporter,
        begin: ResumePoint,
    ) -> None:
        flags = config.logging
        self._devices, self._main = mesh.world.size, mesh.world.rank == 0
        self._prices = Prices(flags.cost_per_gpu_hour, flags.grid_gco2_per_kwh)
        self._energy = RunEnergy(mesh, device)
        # The processes were there before this object; a wait for a scheduler is not counted.
        age = max(0.0, time.time() - psutil.Process().create_time())
        self._began = time.monotonic() - age
        self._save = None if config.checkpoint.save is None else Path(config.checkpoint.save)
        self._before, self._warned = Totals(), False
        self._totals, self._write_at = Totals(), 0.0
        if self._main and begin.iteration:
            self._before = self._spent_before(begin)
        report.spending = self._spending
        for line in self._energy.refused:
            report.say(line)
        if flags.grid_gco2_per_kwh is not None and not self._energy.counted:
            why = "; ".join([*self._energy.refused, *self._energy.absent])
            report.say(f"--grid-gco2-per-kwh has no effect: {why}")

    def _spent_before(self, begin: ResumePoint) -> Totals:
        loaded = None if begin.folder is None else begin.folder.parent
        folders = (folder for folder in (self._save, loaded) if folder is not None)
        return next((found for found in map(read_totals, folders) if found != Totals()), Totals())

    def _spending(self, seconds_left: float) -> Spending:
        """For the log line; every rank calls it."""
        joules = self._energy.used()
        device_seconds = self._devices * (time.monotonic() - self._began)
        self._totals = self._before.plus(self._prices.totals(joules, device_seconds))
        if time.monotonic() >= self._write_at:
            self._write()
        cost_left = self._prices.cost(self._devices * seconds_left)
        return self._prices.spending(self._totals, joules, cost_left)

    def _write(self) -> None:
        self._write_at = time.monotonic() + _SECONDS
        if self._save is None or not self._main or self._totals == Totals():
            return
        try:
            write_totals(self._save, self._totals)
        except OSError as error:
            if not self._warned:
                logger.warning("what the run has spent is not kept: %s", one_line(error))
            self._warned = True

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._write()
        self._energy.close()
