"""Flags for the cost and the CO2 emissions of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import FlagPart
from megatron.config.flags import NOT_NEGATIVE, option


@dataclass(frozen=True, kw_only=True)
class EnergyFlags(FlagPart):
    """Prices of a run's device time and energy."""

    cost_per_gpu_hour: float | None = option(None, bounds=NOT_NEGATIVE)
    """Price per device-hour (per process-hour on CPUs), in any currency. If set, the log shows the
    cost so far, including earlier starts of the run, and the estimated remaining cost."""
    grid_gco2_per_kwh: float | None = option(None, bounds=NOT_NEGATIVE)
    """Grams of CO2 per kWh of electricity. If set, and energy is measured, the log shows the
    emissions."""
