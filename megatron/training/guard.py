"""Stops training after a step whose loss or gradients were not finite."""

from __future__ import annotations

import math

import torch

from megatron.training.lagged import LaggedReads, lag_on
from megatron.training.trainer import Callback, Step, Trainer


class TrainingStopped(ValueError):
    """Training cannot go on; the message says at which step and samples."""


class NonFiniteGuard(Callback):
    """Stops training after a step whose loss or gradients were not finite.

    Args:
        device: where steps run.
        fp16: whether gradients overflow as a part of training, by their scale.
        check: whether anything else stops it (``--check-for-nan-in-loss-and-grad``).
    """

    def __init__(self, device: torch.device, fp16: bool, check: bool) -> None:
        self._fp16, self._check = fp16, check
        self._reads: LaggedReads[Step] = LaggedReads(lag_on(device))

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """Notes a step, and looks at one some steps ago.

        Raises:
            TrainingStopped: that one was not finite. The weights are as they were before it.
        """
        result = step.result
        if not self._check or (isinstance(result.skipped, bool) and not result.skipped):
            return
        if isinstance(result.skipped, bool):  # the host knows already
            return self._judge(step, float(result.loss))
        # In float32 a large finite float64 loss would look infinite.
        self._reads.add(step, torch.stack((result.skipped.double(), result.loss.double())))
        self._look()

    def settle(self, trainer: Trainer) -> None:
        """Looks at all steps so far; waits for them.

        Raises:
            TrainingStopped: one was not finite. The weights are as they were before it.
        """
        self._look(at_all=True)

    def _look(self, at_all: bool = False) -> None:
        for step, (held, loss) in self._reads.due(at_all):
            if held:
                self._judge(step, loss)

    def _judge(self, step: Step, loss: float) -> None:
        """An overflow of scaled fp16 gradients is part of training; anything else is not."""
        if math.isfinite(loss) and self._fp16:
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else "the gradients are not finite"
        last = step.first_sample + step.samples - 1
        raise TrainingStopped(
            f"{what} at iteration {step.iteration}, samples {step.first_sample} to {last}; "
            "the weights are as they were before it. --no-check-for-nan-in-loss-and-grad skips "
            "such steps"
        )
