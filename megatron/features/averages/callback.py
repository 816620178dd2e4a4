"""Averages of the trained weights, and evaluation of a model with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.engine.state import has_main_weights, holders, owned_slices, set_trained_weights
from megatron.engine.train_engine import TrainEngine
from megatron.training.metrics import Evaluation
from megatron.training.trainer import Callback, Step, Trainer


@torch.no_grad()
def add_weights(
    engine: TrainEngine, kind: str, decay: float | None, skipped: Tensor | bool
) -> None:
    """Add the weights after a step to an average, unless the step was skipped.

    The average starts as a copy of the first weights. After that it is ``decay`` x average + (1 -
    ``decay``) x weights or, without a decay, the mean of all weights. The formula is that of
    ``torch.optim.swa_utils.AveragedModel``, in float32.
    """
    kept = engine.kept[kind]
    if skipped is True:
        return
    if not kept.tensors:
        kept.restart(holders(engine), 1)
        kept.count = 0
    device = engine.device
    count = torch.as_tensor(kept.count, dtype=torch.int64, device=device)
    share = 1 / (count + 1).double()
    if decay is not None:
        share = torch.where(count == 0, 1.0, 1 - decay).double()
    counts = 1 - torch.as_tensor(skipped, device=device).to(torch.int64)
    for own in owned_slices(engine):
        average = own.get(kind)
        average.lerp_(own.get("weight"), (share * counts).to(average.device, average.dtype))
    kept.count = count + counts


@contextmanager
def computing_with(engine: TrainEngine, kind: str) -> Iterator[None]:
    """Make the model compute with an averaged copy of its weights inside this context, rounded like
    the trained weights. Collective: every rank must enter it, between steps. If the optimizer
    updates the model's own weights, a copy of them is kept and restored."""
    separate = has_main_weights(engine)
    copies = {} if separate else {param: param.detach().clone() for param in engine.trained}
    set_trained_weights(engine, lambda own: own.get(kind))
    try:
        yield
    finally:
        if separate:
            set_trained_weights(engine, lambda own: own.get("weight"))
        else:
            for param, values in copies.items():
                param.data.copy_(values)
            engine.kernels.invalidate()


@dataclass(frozen=True)
class AverageEvaluation:
    """Evaluation of a model with the average ``kind`` of its weights."""

    plain: Evaluation
    average: str

    @property
    def iteration(self) -> int:
        """Number of steps before the evaluation."""
        return self.plain.iteration

    @property
    def kind(self) -> str:
        """Name under which metric writers receive the values."""
        return f"{self.plain.kind} {self.average}"

    def line(self) -> str:
        """Return the line for the console."""
        words = f" loss of the {self.average.replace('_', ' ')} at iteration"
        return self.plain.line().replace(" loss at iteration", words, 1)

    def row(self) -> dict[str, float | None]:
        """Return the values by name, for writers."""
        return self.plain.row()


class AverageTerms(NamedTuple):
    """Iterations that enter an average: ``first``, and every ``every``-th iteration after it.
    ``decay`` is the decay of an exponential average, or None for a uniform mean."""

    decay: float | None
    first: int
    every: int = 1


class Averages(Callback):
    """Callback that updates the averages after every step and before a checkpoint is saved. It
    also evaluates the averaged weights whenever the trained weights are evaluated, on the same
    samples."""

    def __init__(self, terms: Mapping[str, AverageTerms]) -> None:
        self._terms = terms

    def after_step(self, trainer: Trainer, step: Step) -> None:
        for kind, terms in self._terms.items():
            since = step.iteration - terms.first
            if since >= 0 and since % terms.every == 0:
                add_weights(trainer.engine, kind, terms.decay, step.result.skipped)

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        if not last and not trainer.plan.evaluates_after(trainer.iteration):
            return
        for kind, kept in trainer.engine.kept.items():
            if kept.tensors:
                with computing_with(trainer.engine, kind):
                    for evaluation in trainer.evaluations(test=last):
                        trainer.report(AverageEvaluation(evaluation, kind))
