"""What a run has spent over all its starts: energy, time of devices, money and CO2."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path

from megatron.features.energy.meter import Joules
from megatron.training.metrics import Spending
from megatron.util.errors import one_line
from megatron.util.files import read_regular, write_whole
from megatron.util.json_text import parse_json

logger = logging.getLogger(__name__)

FILE = "run/totals.json"
"""In the folder of checkpoints."""
_JOULES_OF_KWH = 3.6e6
_SECONDS_OF_HOUR = 3600.0


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
        names = (field.name for field in dataclasses.fields(self))
        return Totals(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class Prices:
    """Of an hour of one device, in any currency, and grams of CO2 of a kWh; None if not known."""

    device_hour: float | None = None
    gco2_per_kwh: float | None = None

    def totals(self, joules: Joules, device_seconds: float) -> Totals:
        """What so much is worth."""
        kwh = (joules.total or 0.0) / _JOULES_OF_KWH
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
        return device_seconds / _SECONDS_OF_HOUR * self.device_hour

    def spending(self, totals: Totals, joules: Joules, cost_left: float | None) -> Spending:
        """For the log: totals, as far as this start counts them."""
        counted = joules.total is not None
        with_co2 = counted and self.gco2_per_kwh is not None
        return Spending(
            energy_joules=totals.joules if counted else None,
            devices_joules=totals.devices_joules if joules.devices is not None else None,
            processors_joules=totals.processors_joules if joules.processors is not None else None,
            device_seconds=totals.device_seconds,
            cost=totals.cost if self.device_hour is not None else None,
            co2_grams=totals.co2_grams if with_co2 else None,
            cost_left=cost_left,
        )


def read_totals(folder: Path) -> Totals:
    """Those of a run in a folder of checkpoints; zeros where it has none. A damaged file counts as
    none, and that is said."""
    path = folder / FILE
    try:
        found = parse_json(read_regular(path), str(path))
        fields = [field.name for field in dataclasses.fields(Totals)]
        values = [float(found.get(name, 0.0)) for name in fields]
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
