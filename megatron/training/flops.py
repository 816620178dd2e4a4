"""What a device could do: floating-point operations per second."""

from __future__ import annotations

import re
import time

import torch

# Dense 16-bit tensor-core rates (bfloat16; float16 on Volta and Turing, which have no bfloat16),
# FLOP/s of one device, from the makers' data sheets, without structured sparsity. The first pattern
# that matches a device's name counts, so variants stand before the part that they derive from.
_PEAKS: tuple[tuple[str, float], ...] = (
    (r"GB300", 2500e12),
    (r"B300", 2250e12),
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"H200 NVL", 835.5e12),
    (r"GH200|H200", 989e12),
    (r"H100 PCIe", 756e12),
    (r"H100 NVL", 835.5e12),
    (r"H100|H800", 989e12),
    (r"H20", 148e12),
    (r"A100|A800", 312e12),
    (r"A40", 149.7e12),
    (r"A30", 165e12),
    (r"A10", 125e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"L4", 121e12),
    (r"V100", 125e12),
    (r"T4", 65e12),
    (r"RTX 6000 Ada", 364e12),
    (r"RTX A6000", 154.8e12),
    (r"RTX 4090$", 165.2e12),
    (r"RTX 3090$", 71e12),
    (r"MI355X", 2516.6e12),
    (r"MI325X|MI300X", 1307.4e12),
    # One device is one of the two dies.
    (r"MI250X", 191.5e12),
)


def peak_flops_of(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of the accelerator with this name, None if it is not in the table.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it, "NVIDIA H100 80GB HBM3".
    """
    for pattern, flops in _PEAKS:
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            return flops
    return None


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit FLOP/s of ``device`` from its maker's data sheet.

    None for CPUs and unknown accelerators: :func:`measure_matmul_peak` finds what they reach.
    """
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def measure_matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float = 0.5) -> float:
    """The highest rate, in FLOP/s, that square matrix products of ``dtype`` reach on ``device``.

    The products grow from 256 to 8192 a side while there is time left, for about ``seconds``.
    Processes that share a machine measure what one of them gets when they measure together.
    """
    deadline = time.perf_counter() + seconds
    best, side = 0.0, 256
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        # The first product of a size pays for set-up and does not count.
        _seconds_of_matmul(a, b)
        duration = _seconds_of_matmul(a, b)
        best = max(best, 2 * side**3 / duration)
        left = deadline - time.perf_counter()
        if left <= 0:
            return best
        # The next size takes 8 times as long, and runs twice.
        if side < 8192 and 16 * duration < left:
            side *= 2


def _seconds_of_matmul(a: torch.Tensor, b: torch.Tensor) -> float:
    _synchronize(a.device)
    start = time.perf_counter()
    torch.matmul(a, b)
    _synchronize(a.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
