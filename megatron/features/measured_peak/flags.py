"""Flag for the peak FLOP rate of a device."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import FlagPart
from megatron.config.flags import option


@dataclass(frozen=True, kw_only=True)
class PeakFlags(FlagPart):
    """Peak FLOP rate."""

    peak_tflops: float | None = option(None, derived="the accelerator's, or measured on CPU")
    """Peak TFLOP/s of one device, from which the log computes the model FLOP utilisation."""
