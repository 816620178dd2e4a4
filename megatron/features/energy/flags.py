"""Flags of the cost and the emissions of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import FlagPart
from megatron.config.flags import NOT_NEGATIVE, option


@dataclass(frozen=True, kw_only=True)
class EnergyFlags(FlagPart):
    """Prices of the time and the energy of a run."""

    cost_per_gpu_hour: float | None = option(None, bounds=NOT_NEGATIVE)
    """Price of an hour of one device, on CPU of one process, in any currency: the log then has the
    cost so far, over all starts of the run, and the cost to finish."""
    grid_gco2_per_kwh: float | None = option(None, bounds=NOT_NEGATIVE)
    """Grams of CO2 for a kWh of electricity, from which the log computes those of the run, where
    its energy is counted."""
