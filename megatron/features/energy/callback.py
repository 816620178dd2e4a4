"""Counts what a run spends over all its starts - energy, time of devices, money, CO2 - and adds it
to its log lines."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatron.config import RunConfig
from megatron.features.energy.counters import Joules, RunEnergy
from megatron.parallel.mesh import Mesh
from megatron.training.report import Reporter
from megatron.training.resume import ResumePoint
from megatron.training.trainer import Callback
from megatron.util.errors import one_line
from megatron.util.files import read_regular, write_whole
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)

FILE = "run/totals.json"
"""In the folder of checkpoints."""
_SECONDS = 10.0
"""Between two writes of the sums, which wait for the disk."""


@dataclass(frozen=True)
class Totals:
    """Sums; what is 0 was not counted or had no price."""

    devices_joules: float = 0.0
    processors_joules: float = 0.0
    device_seconds: float = 0.0
    cost: float = 0.0
    co2_grams: float = 0.0

    @property
    def joules(self) -> float:
        return self.devices_joules + self.processors_joules

    def plus(self, other: Totals) -> Totals:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Totals(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class Prices:
    """Price of an hour of one device, in any currency, and grams of CO2 of a kWh; None if not
    known."""

    device_hour: float | None = None
    gco2_per_kwh: float | None = None

    def totals(self, joules: Joules, device_seconds: float) -> Totals:
        """Return the money and CO2 of an amount of energy and time."""
        kwh = (joules.total or 0.0) / 3.6e6
        return Totals(
            joules.devices or 0.0,
            joules.processors or 0.0,
            device_seconds,
            self.cost(device_seconds) or 0.0,
            kwh * (self.gco2_per_kwh or 0.0),
        )

    def cost(self, device_seconds: float) -> float | None:
        if self.device_hour is None:
            return None
        return device_seconds / 3600 * self.device_hour

    def spending(
        self, totals: Totals, joules: Joules, cost_left: float | None
    ) -> dict[str, float | None]:
        """Numbers for the log: totals, as far as this start counts them."""
        values = dataclasses.asdict(totals) | {"energy_joules": totals.joules}
        counted = {
            "energy_joules": joules.total is not None,
            "devices_joules": joules.devices is not None,
            "processors_joules": joules.processors is not None,
            "device_seconds": True,
            "cost": self.device_hour is not None,
            "co2_grams": joules.total is not None and self.gco2_per_kwh is not None,
        }
        spent = {name: values[name] for name, known in counted.items() if known}
        return spent if cost_left is None else spent | {"cost_left": cost_left}


def read_totals(folder: Path) -> Totals:
    """Totals of a run in a folder of checkpoints; zeros where it has none. A damaged file is
    treated as none, with a warning."""
    path = folder / FILE
    try:
        content = parse_json(read_regular(path), str(path))
        fields = [field.name for field in dataclasses.fields(Totals)]
        values = [float(content.get(name, 0.0)) for name in fields]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{path} has values that no sum has")
    except FileNotFoundError:
        return Totals()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("energy and cost are counted from zero: %s", one_line(error))
        return Totals()
    return Totals(*values)


def write_totals(folder: Path, totals: Totals) -> None:
    """Raises OSError if they cannot be written; the older ones stay."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dataclasses.asdict(totals), indent=1).encode() + b"\n")


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
            loaded = None if begin.folder is None else begin.folder.parent
            folders = [folder for folder in (self._save, loaded) if folder is not None]
            spent = (totals for totals in map(read_totals, folders) if totals != Totals())
            self._before = next(spent, Totals())
        report.at_line.append(self._spending)
        for line in self._energy.refused:
            report.say(line)
        if flags.grid_gco2_per_kwh is not None and not self._energy.counted:
            why = "; ".join([*self._energy.refused, *self._energy.absent])
            report.say(f"--grid-gco2-per-kwh has no effect: {why}")

    def _spending(self, seconds_left: float) -> dict[str, float | None]:
        """Numbers for the log line; every rank calls it."""
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
