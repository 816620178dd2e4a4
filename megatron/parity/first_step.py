"""What the engine made of a run's first step: which parameter differs, where layers are right.

The gradients that reached the optimizer are read back from its first moments, which the reference's
own gradients are compared with, and the weights after the step are those that it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import OptimizerConfig
from megatron.engine.state import fragments
from megatron.engine.train_engine import TrainEngine
from megatron.parallel.mesh import Coordinates
from megatron.parallel.shard import Shard
from megatron.parity.gradients import Difference
from megatron.parity.training import PlainTraining

GRADIENT_BOUND = 1e-4
"""Of a float32 gradient, relative."""
UPDATE_BOUND = 1e-2
"""Of a float32 weight's change, relative to the parameter's largest. Adam divides a gradient by
itself in its first step, so that one near zero moves its weight either way: only weights whose
gradient is above 1e-3 x the parameter's largest are compared."""


@dataclass(frozen=True)
class Part:
    """What one rank's optimizer holds of a parameter after the first step.

    Attributes:
        name: canonical name of the parameter.
        shard: how it is cut.
        coordinates: the rank's place in the mesh.
        start: where the part starts in the flattened local share.
        gradient: before clipping; None where the optimizer keeps none.
        weight: after the step.
    """

    name: str
    shard: Shard
    coordinates: Coordinates
    start: int
    gradient: Tensor | None
    weight: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """The same part of a whole parameter with the padding of one process."""
        canonical = whole.narrow(0, 0, self.shard.canonical_shape[0])
        share = self.shard.cut(canonical, self.coordinates).reshape(-1)
        return share[self.start : self.start + self.weight.numel()]


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


def parts_of(engine: TrainEngine, norm: float) -> list[Part]:
    """This rank's parts, right after the first step.

    Args:
        engine: the engine.
        norm: gradient norm of the step, by which the gradients were clipped.
    """
    options = engine.config.optimizer
    unclip = _clipping(options, norm) / (1 - options.adam_beta1)
    found = []
    for part in fragments(engine):
        moment = part.moments.get("exp_avg")
        gradient = None if moment is None else moment.detach().cpu() * unclip
        place = engine.mesh.coordinates
        weight = part.weight.detach().cpu().clone()
        found.append(Part(part.name, part.shard, place, part.start, gradient, weight))
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
    ranks: Sequence[Sequence[Part]], reference: dict[str, WholeParameter]
) -> Difference | None:
    """The first parameter, in the order of the backward pass, whose gradient differs on a rank;
    where none does, whose new weights do."""
    return gradient_difference(ranks, reference) or _weight_difference(ranks, reference)


def gradient_difference(
    ranks: Sequence[Sequence[Part]],
    reference: dict[str, WholeParameter],
    bound: float = GRADIENT_BOUND,
    floor: float = 1e-3,
) -> Difference | None:
    """The first parameter whose gradient differs by more than ``bound`` x the larger of its largest
    value and ``floor`` x the model's."""
    largest = max(float(whole.gradient.abs().max()) for whole in reference.values())
    for name, whole in reversed(reference.items()):
        allowed = bound * max(float(whole.gradient.abs().max()), floor * largest)
        for rank, parts in enumerate(ranks):
            for part in parts:
                if part.name == name and part.gradient is not None:
                    found = float((part.gradient - part.of(whole.gradient)).abs().max())
                    if not found <= allowed:
                        return Difference(f"gradient of {name}", rank, found, allowed)
    return None


def _weight_difference(
    ranks: Sequence[Sequence[Part]], reference: dict[str, WholeParameter]
) -> Difference | None:
    for name, whole in reversed(reference.items()):
        rounding = torch.finfo(torch.float32).eps * float(whole.weight.abs().max())
        allowed = UPDATE_BOUND * whole.change + 4 * rounding
        threshold = 1e-3 * float(whole.gradient.abs().max())
        for rank, parts in enumerate(ranks):
            for part in parts:
                if part.name == name:
                    compared = part.of(whole.gradient).abs() > threshold
                    off = ((part.weight - part.of(whole.weight)).abs() * compared).max()
                    if not float(off) <= allowed:
                        return Difference(f"new weights of {name}", rank, float(off), allowed)
    return None
