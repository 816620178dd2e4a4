"""A composition next to one process, and next to itself without a stop."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pool import Pool
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from training_jobs import gradients, train

from compositions.draw import Composition
from megatron.apps.parity.gradients import first_difference, reference_gradients
from megatron.apps.parity.runs import Drift, RunRecord
from megatron.families import spec_of
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.run.run import parse_run

FIRST = {"": (2e-6, 2e-5)}
LATER = {"": (1e-3, 5e-2)}
HALF = (1e-2, 1e-1)
"""Allowed relative differences of loss and gradient norm of the first step and of later ones.
Rounding grows from step to step, fastest where an update takes the sign of a gradient."""
LIMIT = 100.0
"""Seconds after which a run is taken to hang."""
NOISY, FACTOR = 8, 4
"""Beyond these bounds a later step may differ by ``FACTOR`` x the largest effect of rounding on
``NOISY`` runs of one process: AdaMuon with bfloat16 products moves its loss by 1e-3 in four steps
where activations change in their last bit."""


def difference(pool: Pool, composition: Composition, last: str = "resume") -> str | None:
    """Return what differs, or None: the ``gradients`` of a step in float64, the losses of
    ``training`` through the engine, a ``resume``'s losses and weights. None of those after ``last``
    is compared.

    Raises:
        RankError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="composition-") as folder:
        return _difference(pool, composition, Path(folder), last)


def _difference(pool: Pool, composition: Composition, folder: Path, last: str) -> str | None:
    base = str(folder / "base")
    if composition.base is not None:
        argv = [*composition.base.flags_alone(), "--seed", "7", "--save", base]
        pool.run(1, trained, [*argv, "--exit-interval", "1"], timeout=LIMIT)
    size, flags = composition.parsed.processes, composition.flags(base, str(folder / "whole"))
    alone = composition.flags_alone(base)
    if composition.comparable:
        wrong = _gradients_differ(pool, composition, base)
        if wrong:
            return f"gradients: {wrong}"
    if last == "gradients":
        return None
    whole = pool.run(size, trained, flags, timeout=LIMIT)
    if flags != alone and composition.comparable:
        alone_record = pool.run(1, trained, alone, timeout=LIMIT)[0]

        def noise() -> Drift:
            seeds = range(1, NOISY + 1)
            noisy = [pool.run(1, trained, alone, seed)[0] for seed in seeds]
            return Drift.between(noisy, alone_record)

        wrong = training_differs(whole[0], alone_record, composition.precision, noise)
        if wrong:
            return f"training: {wrong}"
    if last == "training":
        return None
    saved = str(folder / "run")
    again = [*composition.flags(base, saved), "--save", saved]
    pool.run(size, trained, [*again, "--exit-interval", str(composition.resume)], timeout=LIMIT)
    resumed = pool.run(size, trained, [*again, "--load", saved], timeout=LIMIT)
    for rank in range(size):
        wrong = _bits_differ(whole[rank], resumed[rank], composition.resume)
        if wrong:
            return f"resume, rank {rank}: {wrong}"
    return None


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
            if step == 0:
                return text
            measured = measured or noise()
            drift = measured.losses if name == "loss" else measured.norms * abs(other[step])
            allowed = FACTOR * drift[: step + 1].max()
            if not abs(mine[step] - other[step]) <= allowed:
                return f"{text}, rounding {allowed:.1g}"
    return None


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
