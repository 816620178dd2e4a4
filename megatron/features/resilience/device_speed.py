"""How fast a rank's GPU is, by a product of matrices that all ranks compute now and then."""

from __future__ import annotations

import torch

_SIDE = 2048
_PRODUCTS = 4
"""Together 69 GFLOP: a tenth of a millisecond on an H100, half of one on a V100."""


class DeviceProbe:
    """Queues products of matrices beside the steps, and reads later how long they took, so that
    nothing waits for the device. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if device.type == "cuda":
            # Not from the global random state, which a resumed run must find as it was.
            generator = torch.Generator(device).manual_seed(0)
            shape = (_SIDE, _SIDE)
            one, other = (
                torch.randn(shape, generator=generator, device=device).half() for _ in range(2)
            )
            self._factors = one, other, torch.empty_like(one)

    def queue(self) -> None:
        """Queues the products on the current stream."""
        if self._factors is None:
            return
        one, other, product = self._factors
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(one, other, out=product)  # the clock of a GPU that was idle rises with the first
        start.record()
        for _ in range(_PRODUCTS):
            torch.mm(one, other, out=product)
        end.record()
        self._events = start, end

    def seconds(self) -> float:
        """Of the products that were queued last; 0 if they are not done, and before the first."""
        if self._events is None or not self._events[1].query():
            return 0.0
        start, end = self._events
        return start.elapsed_time(end) / 1000
