"""Compares layouts with one process, on the user's model and data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from megatron.config import ConfigError
from megatron.config.layouts import Layout, check_layout
from megatron.engine.environment import distributed
from megatron.engine.train_engine import StepResult
from megatron.families import spec_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.parity.first_step import (
    SteppedSlice,
    WholeParameter,
    first_step_difference,
    first_step_of,
    gradient_difference,
    stepped_slices,
)
from megatron.parity.flags import CheckFlags
from megatron.parity.gradients import (
    GradientRecord,
    first_difference,
    gradients_in,
    reference_gradients,
)
from megatron.parity.launch import RankError, Ranks, environment
from megatron.parity.training import (
    Drift,
    PlainTraining,
    Record,
    rounding_noise,
    watched_trainer,
)
from megatron.training.run import parse_run

FIRST_STEP = 1e-6
"""How far loss and gradient norm may be at the first step, in fp32, relative."""
FACTOR = 4
"""How many times what rounding does to one process they may be off after it: a layout cuts up more
sums than the runs that this is measured on."""
HALF_LOSS = 5e-3
HALF_NORM = 2e-2
"""How far loss and gradient norm of bf16 and fp16 may be from those of one process in fp32,
relative."""
HALF_GRADIENT = 0.1
"""How far the gradients of their first step may be, relative to the larger of the parameter's
largest and a tenth of the model's."""

ALONE = {"WORLD_SIZE": "1"}
"""What a launcher, or slurm, has said to this process does not count."""
ATTENTION_OFF = ("--attention-dropout", "0")
HIDDEN_OFF = ("--hidden-dropout", "0")


@dataclass(frozen=True)
class Distance:
    """How far a run is from another.

    Attributes:
        loss: largest difference of the loss, absolute.
        norm: largest difference of the gradient norm, relative to it.
    """

    loss: float
    norm: float


@dataclass(frozen=True)
class Outcome:
    """How a layout compared.

    Attributes:
        layout: its name, as given.
        status: ``equal``, ``different``, ``refused`` or ``failed``.
        reason: why it is refused or failed, or what differs first.
        resolved: its full name, with what the DeepSpeed JSON adds.
        processes: number of processes.
        dropout_off: which dropout was turned off, because its masks are not those of one process.
        losses: loss of every step.
        norms: gradient norm of every step.
        plain_losses: loss of every step of one process.
        plain_norms: gradient norm of every step of one process.
        largest: the largest difference.
        allowed: what it may be; in fp32 at the first step 1e-6 relative at most.
    """

    layout: str
    status: str
    reason: str = ""
    resolved: str = ""
    processes: int = 0
    dropout_off: str = ""
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    plain_losses: tuple[float, ...] = ()
    plain_norms: tuple[float, ...] = ()
    largest: Distance | None = None
    allowed: Distance | None = None


@dataclass(frozen=True)
class Plain:
    """Training on one process."""

    record: Record
    noise: Drift
    first: dict[str, WholeParameter]


class Checker:
    """Checks layouts of one model.

    Args:
        flags: of model, data and training.

    Raises:
        ValueError, OSError: they are wrong whatever the layout.
    """

    def __init__(self, flags: CheckFlags) -> None:
        self._flags = flags
        with environment(ALONE):
            self.config = parse_run(None, flags.plain).config
        self._plain_gradients = cache(_plain_gradients)
        self._plain_training = cache(_plain_training)

    def check(self, name: str, layout: Layout) -> Outcome:
        """Compares one step in float64, then whole steps through the engine.

        Raises:
            ValueError, OSError: one process cannot do it either: data or training are at fault.
        """
        argv = [*self._flags.layout, *layout.flags()]
        try:
            check_layout(layout)
            with environment({"WORLD_SIZE": str(layout.processes)}):
                run = parse_run(None, argv)
        except ConfigError as error:
            return Outcome(name, "refused", str(error))
        # The DeepSpeed JSON can have added to it.
        layout = run.config.layout(run.content)
        off = self._dropout_off(layout)
        outcome = Outcome(
            name,
            "equal",
            resolved=layout.name,
            processes=layout.processes,
            dropout_off=" and ".join(word.removeprefix("--") for word in off[::2]),
        )
        plain = (*self._flags.plain, *off)
        with environment(ALONE):
            expected, training = self._plain_gradients(plain), self._plain_training(plain)
        with Ranks(layout.processes, _on_each_rank, [*argv, *off]) as ranks:
            try:
                reason = self._float64_difference(ranks.results(), expected)
            except RankError as error:
                return replace(outcome, status="failed", reason=f"in float64, {error}")
            try:
                record, parts = _joined(ranks.results())
            except RankError as error:
                if reason:
                    return replace(outcome, status="different", reason=reason)
                return replace(outcome, status="failed", reason=f"in DeepSpeed's engine, {error}")
        reason = reason or _training_difference(layout, record, parts, training)
        outcome = replace(outcome, status="different" if reason else "equal", reason=reason)
        return _with_numbers(outcome, layout, record, training)

    def _dropout_off(self, layout: Layout) -> tuple[str, ...]:
        model = self.config.model
        off: tuple[str, ...] = ()
        if model.attention.attention_dropout and layout.dropout != "all":
            off += ATTENTION_OFF
        if model.hidden_dropout and layout.dropout == "none":
            off += HIDDEN_OFF
        return off

    def _float64_difference(
        self, records: Sequence[GradientRecord], expected: GradientRecord
    ) -> str:
        layers = spec_of(self.config.model, self.config.parallel).layers(TensorParallel())
        difference = first_difference(records, expected, layers)
        return "" if difference is None else f"{difference} (one step in float64)"


def _on_each_rank(argv: Sequence[str]) -> Iterator[Any]:
    """A step in float64, then training in the same process: starting one takes longer than both."""
    run = parse_run(None, argv)
    with distributed(run.config.parallel) as mesh:
        yield gradients_in(run, mesh)
        record, slices = Record(), []

        def watch(result: StepResult) -> None:
            record.add(result)
            if len(record.losses) == 1:
                slices.extend(stepped_slices(trainer.engine, float(result.grad_norm)))

        trainer = watched_trainer(run, mesh, watch)
        trainer.fit()
        yield record, slices


def _joined(
    found: Sequence[tuple[Record, list[SteppedSlice]]],
) -> tuple[Record, list[list[SteppedSlice]]]:
    """The record, which every rank has, and the slices of each."""
    return found[0][0], [slices for _, slices in found]


def _plain_gradients(argv: Sequence[str]) -> GradientRecord:
    record = reference_gradients(argv)
    _check_finite([record.loss], [record.norm])
    return record


def _plain_training(argv: Sequence[str]) -> Plain:
    training, record = PlainTraining(argv), Record()
    loss, norm, first = first_step_of(training)
    steps = [(loss, norm), *(training.step() for _ in range(training.steps - 1))]
    record.losses, record.norms = map(list, zip(*steps, strict=True))
    _check_finite(record.losses, record.norms)
    return Plain(record, rounding_noise(argv, record), first)


def _check_finite(losses: Sequence[float], norms: Sequence[float]) -> None:
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        if not math.isfinite(loss + norm):
            raise ConfigError(
                f"one process by itself has loss {loss} and gradient norm {norm} at step {step}; "
                "choose another --lr or --init-method-std"
            )


def _training_difference(
    layout: Layout, record: Record, ranks: Sequence[Sequence[SteppedSlice]], plain: Plain
) -> str:
    """What differs first in training, nothing if nothing does."""
    if any(record.skipped):
        step = record.skipped.index(True)
        return (
            f"step {step + 1} was skipped: gradients overflowed at loss scale "
            f"{record.scales[step]:g}; set a smaller --initial-loss-scale"
        )
    if len(record.losses) != len(plain.record.losses):
        return f"{len(record.losses)} steps were trained instead of {len(plain.record.losses)}"
    if layout.precision == "fp32":
        difference = first_step_difference(ranks, plain.first)
    else:
        difference = gradient_difference(ranks, plain.first, HALF_GRADIENT, floor=0.1)
    if difference is not None:
        return f"{difference} (first step through DeepSpeed's engine)"
    drift, bounds = Drift.between([record], plain.record), _bounds(layout, plain)
    for step in range(len(record.losses)):
        for what, found, allowed in (
            ("loss", drift.losses[step], bounds.losses[step]),
            ("gradient norm", drift.norms[step], bounds.norms[step]),
        ):
            if not found <= allowed:
                return (
                    f"{what} of step {step + 1}: {found:.1e} off, {allowed:.1e} allowed (gradients "
                    "and new weights of the first step agree)"
                )
    return ""


def _bounds(layout: Layout, plain: Plain) -> Drift:
    """How far each step may be off."""
    losses = np.abs(plain.record.losses)
    if layout.precision != "fp32":
        return Drift(HALF_LOSS * losses, np.full_like(losses, HALF_NORM))
    bounds = Drift(
        np.full_like(losses, FACTOR * plain.noise.losses.max()),
        np.full_like(losses, FACTOR * plain.noise.norms.max()),
    )
    bounds.losses[0] = min(bounds.losses[0], FIRST_STEP * losses[0])
    bounds.norms[0] = min(bounds.norms[0], FIRST_STEP)
    return bounds


def _with_numbers(outcome: Outcome, layout: Layout, record: Record, plain: Plain) -> Outcome:
    if len(record.losses) != len(plain.record.losses):
        return outcome
    drift, bounds = Drift.between([record], plain.record), _bounds(layout, plain)
    return replace(
        outcome,
        losses=tuple(record.losses),
        norms=tuple(record.norms),
        plain_losses=tuple(plain.record.losses),
        plain_norms=tuple(plain.record.norms),
        largest=Distance(float(drift.losses.max()), float(drift.norms.max())),
        allowed=Distance(float(bounds.losses.max()), float(bounds.norms.max())),
    )
