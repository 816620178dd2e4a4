"""Compares layouts with one process, on the user's model and data."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from torch.multiprocessing.spawn import ProcessException

from megatron.config import ConfigError
from megatron.config.layouts import Layout, check_layout
from megatron.parallel.region import TensorParallel
from megatron.parity.gradients import first_difference, gradients, reference_gradients
from megatron.parity.launch import run_on
from megatron.parity.training import (
    Drift,
    Record,
    first_moment_difference,
    first_moments,
    reference_first_moments,
    rounding_noise,
    train,
    train_plainly,
)
from megatron.training.gpt import gpt_program
from megatron.training.run import parse_run

HALF_PRECISION = 2e-2
"""How far loss and gradient norm of bf16 and fp16 may be from those of one process in fp32,
relative."""


@dataclass(frozen=True)
class Outcome:
    """How a layout compared.

    Attributes:
        layout: its name.
        status: ``equal``, ``different``, ``refused`` or ``failed``.
        reason: why it is refused or failed, or what differs first.
        dropout: whether dropout was on.
        losses: loss of every step.
        norms: gradient norm of every step.
        reference: the same of one process.
        drift: largest differences of loss (absolute) and norm (relative) from one process.
        noise: the same between runs of one process that sum in other orders.
    """

    layout: str
    status: str
    reason: str = ""
    dropout: bool = False
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    reference: tuple[tuple[float, float], ...] = ()
    drift: tuple[float, float] = (0.0, 0.0)
    noise: tuple[float, float] = (0.0, 0.0)


def smallest_batch(layouts: Sequence[Layout], micro_batch_size: int) -> int:
    """The smallest global batch that every layout can work on."""
    each = [micro_batch_size * a.data for a in layouts]
    step = math.lcm(*each, *(e * a.pipeline for e, a in zip(each, layouts, strict=True)))
    fewest = max(e * a.fewest_micro_batches for e, a in zip(each, layouts, strict=True))
    # With one micro batch there would be no sum over micro batches to get wrong.
    fewest = max(fewest, 2 * max(each))
    return -(-fewest // step) * step


class Checker:
    """Checks layouts of one model.

    Args:
        argv: flags of model, data and training, without any of the layout.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self._plain = cache(self._plain_training)
        self._plain_step = cache(lambda dropout: reference_gradients(self._flags(dropout)))

    def check(self, layout: Layout) -> Outcome:
        """Compares gradients of one step in float64, then whole steps through the engine.

        Raises:
            ConfigError, ValueError: the flags are wrong whatever the layout.
        """
        try:
            check_layout(layout)
            with _world(layout.processes):
                run = parse_run(None, [*self.argv, *layout.flags()])
                check_layout(Layout.of(run.config, run.content))
        except ConfigError as error:
            return Outcome(layout.name, "refused", str(error))
        model = run.config.model
        wanted = bool(model.hidden_dropout or model.attention_dropout)
        dropout = wanted and layout.dropout == "all"
        try:
            difference = self._gradient_difference(layout, dropout)
            if difference is not None:
                return Outcome(layout.name, "different", difference, dropout)
            return self._compare_training(layout, dropout)
        except ProcessException as error:
            return Outcome(layout.name, "failed", str(error).strip(), dropout)

    def _flags(self, dropout: bool) -> list[str]:
        off = [] if dropout else ["--hidden-dropout", "0", "--attention-dropout", "0"]
        return [*self.argv, *off]

    def _gradient_difference(self, layout: Layout, dropout: bool) -> str | None:
        plain = dataclasses.replace(layout, zero=0, precision="fp32", grads_in_fp32=False)
        flags = self._flags(dropout)
        records = run_on(layout.processes, gradients, [*flags, *plain.flags()])
        layers = gpt_program(parse_run(None, flags).config).layers(TensorParallel())
        difference = first_difference(records, self._plain_step(dropout), layers)
        return None if difference is None else f"{difference} (one step in float64)"

    def _plain_training(self, dropout: bool) -> tuple[Record, Drift]:
        flags = self._flags(dropout)
        reference = train_plainly(flags)
        return reference, rounding_noise(flags, reference)

    def _compare_training(self, layout: Layout, dropout: bool) -> Outcome:
        flags = [*self._flags(dropout), *layout.flags()]
        reference, noise = self._plain(dropout)
        record: Record = run_on(layout.processes, train, flags)[0]
        drift = Drift.between([record], reference)
        if layout.precision == "fp32":
            equal = drift.within(noise, reference)
        else:
            relative = drift.losses.max() / abs(reference.losses[0])
            equal = max(relative, drift.norms.max()) <= HALF_PRECISION
        reason = "" if equal else self._why(layout, flags, dropout)
        return Outcome(
            layout.name,
            "equal" if equal else "different",
            reason,
            dropout,
            tuple(record.losses),
            tuple(record.norms),
            tuple(zip(reference.losses, reference.norms, strict=True)),
            (float(drift.losses.max()), float(drift.norms.max())),
            (float(noise.losses.max()), float(noise.norms.max())),
        )

    def _why(self, layout: Layout, flags: list[str], dropout: bool) -> str:
        """The layers are right in float64, so it is the engine: what did its first step see?"""
        if layout.precision != "fp32":
            return f"loss or gradient norm differ by more than {HALF_PRECISION} relative"
        found = run_on(layout.processes, first_moments, flags)
        name = first_moment_difference(found, reference_first_moments(self._flags(dropout)))
        if name is None:
            return "the first step is right; later ones drift further apart than rounding explains"
        return f"{name}, after the first step through the engine (its gradients are right)"


@contextmanager
def _world(size: int) -> Iterator[None]:
    """Flags mean what they do on this many processes."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


