"""Peak FLOP rate of a run's devices, from which the log computes utilisation. It is given by the
user, taken from an accelerator's data sheet, or measured at the start on a CPU."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.features.measured_peak.flags import PeakFlags


class MeasuredPeak(Feature):
    flag_parts = {"logging": PeakFlags}

    def peak(self, config: Any, device: Any) -> tuple[float, str] | None:
        if config.logging.peak_tflops is not None:
            return config.logging.peak_tflops * 1e12, "--peak-tflops"
        import torch

        from megatron.features.measured_peak.products import measure_matmul_peak
        from megatron.features.measured_peak.rates import peak_flops

        if device.type != "cpu":
            rate = peak_flops(device)
            return None if rate is None else (rate, "data sheet")
        dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
        rate = measure_matmul_peak(dtype, torch.device("cpu"), seconds=0.2)
        return rate, "measured with matrix products at start-up"


FEATURE = MeasuredPeak()
