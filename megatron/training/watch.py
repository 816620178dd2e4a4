"""What the trainer must know of a step before long: was it finite, and does a rank want to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.step_result import StepResult
from megatron.training.lagged import GPU_LAG, LaggedReads


class TrainingStopped(ValueError):
    """Training cannot go on; the message says at which step and samples."""


@dataclass(frozen=True)
class _Place:
    iteration: int
    first_sample: int
    samples: int


class StepWatch:
    """Stops training after a step whose loss or gradients were not finite.

    Args:
        device: where steps run.
        fp16: whether gradients overflow as a part of training, by their scale.
        check: whether anything else stops it (``--check-for-nan-in-loss-and-grad``).
    """

    def __init__(self, device: torch.device, fp16: bool, check: bool) -> None:
        self._fp16, self._check = fp16, check
        self._reads: LaggedReads[_Place] = LaggedReads(lag_on(device))

    def add(self, result: StepResult, iteration: int, first_sample: int, samples: int) -> None:
        """Notes a step, and looks at one some steps ago.

        Args:
            result: of the step.
            iteration: its number, from 1.
            first_sample: samples of all steps before it.
            samples: of this step.

        Raises:
            TrainingStopped: see :meth:`look`.
        """
        if not self._check or (isinstance(result.skipped, bool) and not result.skipped):
            return
        place = _Place(iteration, first_sample, samples)
        if isinstance(result.skipped, bool):  # the host knows already
            return self._judge(place, 1.0, float(result.loss))
        # In float32 a large finite float64 loss would look infinite.
        self._reads.add(place, torch.stack((result.skipped.double(), result.loss.double())))
        self.look()

    def look(self, at_all: bool = False) -> None:
        """Looks at the steps that are due.

        Args:
            at_all: whether the last steps are too; waits for them.

        Raises:
            TrainingStopped: one was not finite. The weights are as they were before it.
        """
        for place, (held, loss) in self._reads.due(at_all):
            if held:
                self._judge(place, held, loss)

    def _judge(self, place: _Place, held: float, loss: float) -> None:
        """An overflow of scaled fp16 gradients is part of training; anything else is not."""
        if math.isfinite(loss) and self._fp16:
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradients are not finite"
        last = place.first_sample + place.samples - 1
        raise TrainingStopped(
            f"{what} at iteration {place.iteration}, samples {place.first_sample} to {last}; "
            "the weights are as they were before it. --no-check-for-nan-in-loss-and-grad skips "
            "such steps"
        )


class StopAgreement:
    """Whether any rank wants to stop, found out without waiting for the newest step.

    Args:
        device: where collectives work.
        ranks: number of processes.
    """

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device, self._alone = device, ranks == 1
        self._reads: LaggedReads[None] = LaggedReads(lag_on(device))

    def reached(self, here: bool, at_end: bool) -> bool:
        """Whether a rank has asked; every rank must call it after every step.

        Args:
            here: whether this rank asks.
            at_end: whether no step follows, so that all that was asked counts.
        """
        if self._alone:
            return here
        # Filled on the device: a copy from the host would wait for it.
        asked: Tensor = torch.full((1,), float(here), device=self._device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        self._reads.add(None, asked)
        return any(value > 0 for _, (value,) in self._reads.due(at_end))


def lag_on(device: torch.device) -> int:
    """How many steps the host may be ahead."""
    return GPU_LAG if device.type == "cuda" else 0
