"""Averages of the weights that are trained, and evaluations of a model with them."""

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
    """Take the weights after a step into an average, unless the step changed none.

    The first weights are the average; later it is ``decay`` times itself plus the rest of 1 times
    the weights or, without a decay, the mean of all. The formula is from
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
    """Within this context the model computes with an average, rounded like trained weights. Every
    rank must enter it, between steps. If the optimizer updates the model's own weights, a copy of
    them is kept."""
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
    """An evaluation of a model with the average ``kind`` of its weights."""

    plain: Evaluation
    average: str

    @property
    def iteration(self) -> int:
        """Steps done before it."""
        return self.plain.iteration

    @property
    def kind(self) -> str:
        """The writers' name for its values."""
        return f"{self.plain.kind} {self.average}"

    def line(self) -> str:
        """The console line."""
        words = f" loss of the {self.average.replace('_', ' ')} at iteration"
        return self.plain.line().replace(" loss at iteration", words, 1)

    def row(self) -> dict[str, float | None]:
        """The values by name, for writers."""
        return self.plain.row()


class AverageTerms(NamedTuple):
    """The weights in an average: those after iteration ``first`` and after every ``every``-th later
    one. ``decay`` is the decay of an exponential average; None for a mean."""

    decay: float | None
    first: int
    every: int = 1


class Averages(Callback):
    """Updates averages, by the names of their states, after every step, before it is saved, and
    evaluates them where the weights are evaluated, on the same samples."""

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
