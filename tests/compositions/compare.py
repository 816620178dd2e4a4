"""A composition next to one process, next to itself without a stop, and next to another layout that
continues it."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from training_jobs import gradients, train
from whole_state import Share, shares
from whole_state import whole as whole_tensors

from compositions.draw import Composition
from megatron.apps.parity.gradients import first_difference, reference_gradients
from megatron.apps.parity.runs import Drift, RunRecord, watched_trainer
from megatron.config import ConfigError
from megatron.engine.environment import distributed
from megatron.families import spec_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

Tensors = Mapping[tuple[str, str], Tensor]
"""Whole tensors by name and kind."""
STAGES = ("gradients", "training", "resume", "elsewhere")
FIRST = {"": (2e-6, 2e-5)}
LATER = {"": (1e-3, 5e-2)}
HALF = (1e-2, 1e-1)
"""Allowed relative differences of loss and gradient norm, of the first step and of later ones, and
of all steps in 16 bits or fewer. Rounding grows from step to step, fastest where an update takes
the sign of a gradient."""
LIMIT = 100.0
"""Seconds after which a run is taken to hang."""
NOISY, FACTOR = 8, 4
"""Beyond these bounds all steps but the first in float32 may differ by ``FACTOR`` x the largest
effect of rounding on ``NOISY`` runs of one process: AdaMuon with bfloat16 products moves its loss
by 1e-3 in four steps where activations change in their last bit."""


def difference(pool: Pool, composition: Composition, only: str | None = None) -> str | None:
    """Return what differs, or None: the ``gradients`` of a step in float64, the losses of
    ``training`` through the engine, a ``resume``'s losses and weights, and what another layout
    loads and continues with, ``elsewhere``; ``only`` is the one of these to compare.

    Raises:
        ConfigError: the other layout does not fit.
        RankError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="composition-") as folder:
        runs = _Runs(pool, composition, Path(folder))
        for stage in STAGES:
            wrong = getattr(runs, stage)() if only in (stage, None) else None
            if wrong:
                return f"{stage}: {wrong}"
    return None


class _Runs:
    """The runs of a composition, each made when it is first needed. Every method that has the name
    of a stage returns what differs, or None."""

    def __init__(self, pool: Pool, composition: Composition, folder: Path) -> None:
        self._pool, self._composition, self._folder = pool, composition, folder
        self._base = str(folder / "base")
        if composition.base is not None:
            argv = [*composition.base.flags_alone(), "--seed", "7", "--save", self._base]
            self._train(1, [*argv, "--exit-interval", "1"])

    def _train(self, size: int, argv: list[str]) -> list[RunRecord]:
        return self._pool.run(size, trained, argv, timeout=LIMIT)

    def _flags(self, run: str) -> list[str]:
        return self._composition.flags(self._base, str(self._folder / run))

    @property
    def _alone(self) -> list[str]:
        return self._composition.flags_alone(self._base)

    @functools.cached_property
    def _whole(self) -> list[RunRecord]:
        return self._train(self._composition.parsed.processes, self._flags("whole"))

    @functools.cached_property
    def _saved(self) -> str:
        """A folder with the checkpoint of a run that was stopped."""
        saved = str(self._folder / "run")
        stop = ["--save", saved, "--exit-interval", str(self._composition.resume)]
        self._train(self._composition.parsed.processes, [*self._flags("run"), *stop])
        return saved

    def gradients(self) -> str | None:
        if not self._composition.comparable:
            return None
        return _gradients_differ(self._pool, self._composition, self._base)

    def training(self) -> str | None:
        if self._flags("whole") == self._alone or not self._composition.comparable:
            return None
        alone = self._train(1, self._alone)[0]
        precision = self._composition.precision
        return training_differs(self._whole[0], alone, precision, lambda: self._noise(alone))

    def resume(self) -> str | None:
        again = [*self._flags("again"), "--save", str(self._folder / "again")]
        size = self._composition.parsed.processes
        resumed = self._train(size, [*again, "--load", self._saved])
        for rank, (whole, rest) in enumerate(zip(self._whole, resumed, strict=True)):
            wrong = _bits_differ(whole, rest, self._composition.resume)
            if wrong:
                return f"rank {rank}: {wrong}"
        return None

    def elsewhere(self) -> str | None:
        other = self._composition.elsewhere
        if other is None:
            raise ConfigError(f"{self._composition.target} does not fit the batch")
        size, flags = other.parsed.processes, [*other.flags(self._base), "--load", self._saved]
        own = [*self._flags("here"), "--load", self._saved]
        here = self._pool.run(self._composition.parsed.processes, loaded, own, timeout=LIMIT)
        there = self._pool.run(size, loaded, flags, timeout=LIMIT)
        coded = "-dtype int8" in self._composition.precision
        wrong = _tensors_differ(whole_tensors(here), whole_tensors(there), coded)
        if wrong or not (self._composition.comparable and other.comparable):
            return wrong
        record = self._train(size, flags)[0]
        rest = _after(self._whole[0], self._composition.resume)
        load = ["--load", self._saved]

        def noise() -> Drift:
            return self._noise(self._train(1, [*self._alone, *load])[0], load)

        return training_differs(record, rest, self._composition.precision, noise)

    def _noise(self, record: RunRecord, load: Sequence[str] = ()) -> Drift:
        """Return the effect of rounding on a run of one process with this record."""
        argv = [*self._alone, *load]
        noisy = [self._pool.run(1, trained, argv, seed)[0] for seed in range(1, NOISY + 1)]
        return Drift.between(noisy, record)


def _tensors_differ(here: Tensors, there: Tensors, coded: bool) -> str | None:
    """Return the first difference. Moments that are ``coded`` in int8 are rounded again to 3 bits
    of mantissa and 16 powers of two, since another layout has other blocks with a common scale."""
    if here.keys() != there.keys():
        return f"{sorted(here.keys() ^ there.keys())[:3]} are in one layout only"
    most = {kind: 0.0 for _, kind in here}
    for (_, kind), values in here.items():
        most[kind] = max(most[kind], float(values.abs().max()))
    for (name, kind), values in here.items():
        rounded = coded and kind != "weight"
        rtol, atol = (2**-3, 2**-15 * most[kind]) if rounded else (0.0, 0.0)
        if not torch.allclose(there[name, kind], values, rtol, atol):
            return f"{kind} of {name} differs"
    return None


def loaded(argv: list[str]) -> list[Share]:
    """Return what this rank holds after loading, and print nothing; for the pool."""
    run = parse_run(None, argv)
    with contextlib.redirect_stdout(io.StringIO()), distributed(run.config.parallel) as mesh:
        return shares(watched_trainer(run, mesh, lambda result: None).engine)


def trained(argv: list[str], noise: int = 0) -> RunRecord:
    """Train with these flags, and print nothing; for the pool. With a seed of ``noise``, outputs of
    layers are a unit in the last place more or less."""
    with contextlib.redirect_stdout(io.StringIO()), _disturbed(noise):
        return train(argv)


@contextlib.contextmanager
def _disturbed(seed: int) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)

    def disturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        if any(module.children()) or not (torch.is_tensor(output) and output.is_floating_point()):
            return output
        signs = torch.randint(-1, 2, output.shape, generator=generator)
        return output * (1 + torch.finfo(output.dtype).eps * signs).to(output.dtype)

    handle = register_module_forward_hook(disturb) if seed else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _gradients_differ(pool: Pool, composition: Composition, base: str) -> str | None:
    # They are in float64 whatever the precision, and the reference has few optimizers.
    composition = composition.without("precision", "optimizer", "averages", "qk_clip", "saving")
    if "--fp32-residual-connection" in str(composition):
        composition = composition.without("residual")
    size, alone = composition.parsed.processes, composition.flags_alone(base)
    expected = reference_gradients(alone)
    records = pool.run(size, gradients, composition.flags(base), timeout=LIMIT)
    config = parse_run(None, alone).config
    layers = spec_of(config.model, config.parallel).layers(TensorParallel())
    return first_difference(records, expected, layers)


def training_differs(
    record: RunRecord, alone: RunRecord, precision: str, noise: Callable[[], Drift]
) -> str | None:
    """Return the first difference that neither the bounds allow nor rounding explains, or None;
    ``noise`` measures the effect of rounding, and is called where a later step is out of bounds."""
    if record.skipped != alone.skipped:
        return f"skipped steps {record.skipped}, alone {alone.skipped}"
    measured: Drift | None = None
    for step in range(len(alone.losses)):
        bounds = (FIRST if step == 0 else LATER).get(precision, HALF)
        pairs = ((record.losses, alone.losses), (record.norms, alone.norms))
        for name, (mine, other), bound in zip(("loss", "norm"), pairs, bounds, strict=True):
            if math.isclose(mine[step], other[step], rel_tol=bound, abs_tol=1e-7):
                continue
            text = f"{name} of step {step + 1}: {mine[step]:.9g}, alone {other[step]:.9g}"
            if step == 0 and not precision:
                return text
            measured = measured or noise()
            drift = measured.losses if name == "loss" else measured.norms * abs(other[step])
            allowed = FACTOR * drift[: step + 1].max()
            if not abs(mine[step] - other[step]) <= allowed:
                return f"{text}, rounding {allowed:.1g}"
    return None


def _after(record: RunRecord, steps: int) -> RunRecord:
    lists = (record.losses, record.norms, record.scales, record.skipped)
    return RunRecord(*(values[steps:] for values in lists))


def _bits_differ(whole: RunRecord, resumed: RunRecord, steps: int) -> str | None:
    for name in ("losses", "norms"):
        rest, again = getattr(whole, name)[steps:], getattr(resumed, name)
        if rest != again:
            return f"{name} {again} after {steps} steps, {rest} without a stop"
    return _state_differs(whole.state, resumed.state)


def _state_differs(
    whole: Mapping[str, np.ndarray], resumed: Mapping[str, np.ndarray]
) -> str | None:
    if whole.keys() != resumed.keys():
        return f"state of {sorted(whole.keys() ^ resumed.keys())[:3]} is in one run only"
    for name, values in whole.items():
        if not np.array_equal(values, resumed[name], equal_nan=True):
            return f"{name} differs"
    return None
