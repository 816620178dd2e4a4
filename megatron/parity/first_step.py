"""What the engine made of a run's first step: which parameter differs, where layers are right.

The gradients that reached the optimizer are read back from its first moments, which the reference's
own gradients are compared with, and the weights after the step are those that it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.slices import Slice
from megatron.config import OptimizerConfig
from megatron.engine.state import owned_slices
from megatron.engine.train_engine import TrainEngine
from megatron.parity.gradients import Difference
from megatron.parity.training import PlainTraining

GRADIENT_BOUND = 1e-4
"""Of a float32 gradient, relative."""
UPDATE_BOUND = 1e-2
"""Of a float32 weight's change, relative to the parameter's largest. Adam divides a gradient by
itself in its first step, so that one near zero moves its weight either way: only weights whose
gradient is above 1e-3 x the parameter's largest are compared."""


@dataclass(frozen=True)
class SteppedSlice:
    """What one rank's optimizer holds of a parameter after the first step.

    Attributes:
        name: canonical name of the parameter.
        slice: the elements; padding, which has zeros, follows them in both tensors.
        gradient: before clipping, flat; None where the optimizer keeps none.
        weight: after the step, flat.
    """

    name: str
    slice: Slice
    gradient: Tensor | None
    weight: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of a whole parameter with the padding of one process."""
        elements = self.slice.cut(whole.narrow(0, 0, self.slice.shape[0]))
        return F.pad(elements, (0, self.weight.numel() - elements.numel()))


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the reference after the first step.

    Attributes:
        gradient: before clipping.
        weight: after the step.
        change: largest change of a weight.
    """

    gradient: Tensor
    weight: Tensor
    change: float


def stepped_slices(engine: TrainEngine, norm: float) -> list[SteppedSlice]:
    """What this rank holds right after the first step.

    Args:
        engine: the engine.
        norm: gradient norm of the step, by which the gradients were clipped.
    """
    options = engine.config.optimizer
    unclip = _clipping(options, norm) / (1 - options.adam_beta1)
    found = []
    for own in owned_slices(engine):
        moment = own.moments.get("exp_avg")
        gradient = None if moment is None else moment.detach().cpu() * unclip
        weight = own.weight.detach().cpu().clone()
        found.append(SteppedSlice(own.name, own.slice, gradient, weight))
    return found


def first_step_of(
    training: PlainTraining,
) -> tuple[float, float, dict[str, WholeParameter]]:
    """Takes the first step of the reference: loss, norm, and whole parameters by name."""
    before = {name: param.detach().clone() for name, param in training.params.items()}
    loss, norm = training.step()
    unclip = _clipping(training.options, norm)
    whole = {}
    for name, param in training.params.items():
        weight, change = param.detach().clone(), float((param.detach() - before[name]).abs().max())
        assert param.grad is not None
        whole[name] = WholeParameter(param.grad * unclip, weight, change)
    return loss, norm, whole


def _clipping(options: OptimizerConfig, norm: float) -> float:
    """By what clipping divided the gradients."""
    return max(1.0, (norm + 1e-6) / options.clip_grad) if options.clip_grad else 1.0


def first_step_difference(
    ranks: Sequence[Sequence[SteppedSlice]], reference: dict[str, WholeParameter]
) -> Difference | None:
    """The first parameter, in the order of the backward pass, whose gradient differs on a rank;
    where none does, whose new weights do."""
    return gradient_difference(ranks, reference) or _weight_difference(ranks, reference)


def gradient_difference(
    ranks: Sequence[Sequence[SteppedSlice]],
    reference: dict[str, WholeParameter],
    bound: float = GRADIENT_BOUND,
    floor: float = 1e-3,
) -> Difference | None:
    """The first parameter whose gradient differs by more than ``bound`` x the larger of its largest
    value and ``floor`` x the model's."""
    largest = max(float(whole.gradient.abs().max()) for whole in reference.values())
    for name, whole in reversed(reference.items()):
        allowed = bound * max(float(whole.gradient.abs().max()), floor * largest)
        for rank, held in enumerate(ranks):
            for own in held:
                if own.name == name and own.gradient is not None:
                    found = float((own.gradient - own.of(whole.gradient)).abs().max())
                    if not found <= allowed:
                        return Difference(f"gradient of {name}", rank, found, allowed)
    return None


def _weight_difference(
    ranks: Sequence[Sequence[SteppedSlice]], reference: dict[str, WholeParameter]
) -> Difference | None:
    for name, whole in reversed(reference.items()):
        rounding = torch.finfo(torch.float32).eps * float(whole.weight.abs().max())
        allowed = UPDATE_BOUND * whole.change + 4 * rounding
        threshold = 1e-3 * float(whole.gradient.abs().max())
        for rank, held in enumerate(ranks):
            for own in held:
                if own.name == name:
                    compared = own.of(whole.gradient).abs() > threshold
                    off = ((own.weight - own.of(whole.weight)).abs() * compared).max()
                    if not float(off) <= allowed:
                        return Difference(f"new weights of {name}", rank, float(off), allowed)
    return None
