"""Numbers that the device works out and the host looks at some steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

Subject = TypeVar("Subject")

GPU_LAG = 2
"""Steps that the host is ahead on a GPU: while it waits for the one before the last, the device has
the last one still to do."""


def lag_on(device: torch.device) -> int:
    """How many steps the host may be ahead."""
    return GPU_LAG if device.type == "cuda" else 0


class LaggedReads(Generic[Subject]):
    """Reads a few numbers per step, ``lag`` steps after they were queued.

    All ranks read the same step at the same time, so that they can decide alike by what it says.

    Args:
        lag: steps that may be unread; 0 reads each at once, which on a CPU costs nothing.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._waiting: deque[tuple[Subject, _HostCopy]] = deque()

    def add(self, subject: Subject, values: Tensor) -> None:
        """Queues the copy of ``values`` to the host.

        Args:
            subject: what they are about, handed back with them.
            values: 1-D, on the device.
        """
        self._waiting.append((subject, _HostCopy(values)))

    def due(self, all_of_them: bool = False) -> Iterator[tuple[Subject, list[float]]]:
        """What has been waiting for long enough, oldest first; waits for the device.

        Args:
            all_of_them: whether what was queued last is due too.
        """
        while len(self._waiting) > (0 if all_of_them else self._lag):
            subject, copy = self._waiting.popleft()
            yield subject, copy.read()


class _HostCopy:
    """A tensor on its way to the host, in memory that the device can write to by itself."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._values.tolist()
        return values
