"""The peak rate of a processor, measured at the start of a run for the utilisation in its log."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class MeasuredPeak(Feature):
    def peak_of_processor(self, config: Any) -> tuple[float, str]:
        import torch

        from megatron.features.measured_peak.products import measure_matmul_peak

        dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
        peak = measure_matmul_peak(dtype, torch.device("cpu"), seconds=0.2)
        return peak, "measured with matrix products at start-up"


FEATURE = MeasuredPeak()
