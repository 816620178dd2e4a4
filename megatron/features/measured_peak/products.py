"""Measurement of the rate of matrix products."""

from __future__ import annotations

import time

import torch


def measure_matmul_peak(dtype: torch.dtype, device: torch.device, seconds: float = 0.5) -> float:
    """Return the highest rate, in FLOP/s, of square matrix products of ``dtype`` on ``device``,
    measured for about ``seconds``. Processes that share a machine and measure at the same time each
    get their own share."""
    deadline = time.perf_counter() + seconds
    best, side = 0.0, 256
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        # The first product of a size includes set-up costs and does not count.
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
    def synchronize() -> None:
        if a.is_cuda:
            torch.cuda.synchronize(a.device)

    synchronize()
    start = time.perf_counter()
    torch.matmul(a, b)
    synchronize()
    return time.perf_counter() - start
