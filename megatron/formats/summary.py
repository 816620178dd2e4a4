"""What is in a checkpoint, and what differs between two, of any format."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.source import Source


@dataclass(frozen=True)
class TensorFacts:
    """One parameter, or one of its moments.

    Attributes:
        name: canonical name.
        kind: ``weight`` or the name of a moment.
        shape: shape of the whole parameter, without padding.
        dtype: number format in which it is stored.
        norm: square root of the sum of squares; None when it was not asked for.
        finite: whether all elements are finite numbers; None when it was not asked for.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    norm: float | None
    finite: bool | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def tensor_facts(source: Source, norms: bool = True) -> Iterator[TensorFacts]:
    """Facts of every tensor, a parameter at a time.

    Args:
        source: the checkpoint.
        norms: read the tensors for norms; without it only names, shapes and formats.

    Raises:
        CheckpointError: a tensor is missing or malformed.
    """
    for name in source.names():
        for kind in source.kinds(name):
            norm = finite = None
            if norms:
                values = source.tensor(name, kind)
                norm, finite = _norm(values), bool(values.isfinite().all())
            shape = source.shape(name)
            yield TensorFacts(name, kind, shape, source.dtype(name, kind), norm, finite)


def run_facts(source: Source) -> dict[str, Any]:
    """Counters, layout and number format of the run that wrote a checkpoint, as far as it says."""
    facts: dict[str, Any] = {}
    for key in ("iteration", "consumed_samples", "optimizer_step"):
        if key in source.state:
            facts[key] = source.state[key]
    if source.run is not None:
        parallel, precision = source.run.parallel, source.run.precision
        facts["layout"] = (
            f"tensor {parallel.tensor_model_parallel_size} x "
            f"pipeline {parallel.pipeline_model_parallel_size} x "
            f"data {parallel.data_parallel_size}, ZeRO stage {source.run.engine.zero_stage}"
        )
        if parallel.pipeline_model_parallel_size > 1:
            facts["layout"] += f", {parallel.pipeline_schedule}"
        facts["trained in"] = next(
            (name for name in ("bf16", "fp16") if getattr(precision, name)), "fp32"
        )
    return facts


def model_facts(source: Source) -> dict[str, Any]:
    """The values of the network's configuration that are not the defaults."""
    flags = source.model.flags()
    values = {field: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    return {field.name: value for field, value in values.items() if value != field.default}


def bytes_on_disk(folder: Path) -> int:
    """Size of all files of a checkpoint."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class TensorDifference:
    """How one tensor differs between two checkpoints.

    Attributes:
        name: canonical name.
        kind: ``weight`` or the name of a moment.
        what: the difference in words; None when only values differ.
        largest: largest absolute difference of an element.
        relative: norm of the difference, relative to the norm in the first.
    """

    name: str
    kind: str
    what: str | None = None
    largest: float = 0.0
    relative: float = 0.0


def tensor_differences(first: Source, second: Source) -> Iterator[TensorDifference]:
    """The tensors that differ, bit for bit, or that only one has.

    Raises:
        CheckpointError: a tensor is missing or malformed.
    """
    names = dict.fromkeys([*first.names(), *second.names()])
    ours, theirs = set(first.names()), set(second.names())
    for name in names:
        kinds_here = first.kinds(name) if name in ours else ()
        kinds_there = second.kinds(name) if name in theirs else ()
        for kind in dict.fromkeys([*kinds_here, *kinds_there]):
            if kind not in kinds_there:
                yield TensorDifference(name, kind, "only in the first")
            elif kind not in kinds_here:
                yield TensorDifference(name, kind, "only in the second")
            elif first.shape(name) != second.shape(name):
                yield TensorDifference(
                    name, kind, f"shape {first.shape(name)} and {second.shape(name)}"
                )
            else:
                here, there = first.tensor(name, kind), second.tensor(name, kind)
                if not torch.equal(here, there):
                    apart = (here.double() - there.double()).abs()
                    scale = _norm(here) or 1.0
                    yield TensorDifference(
                        name, kind, None, float(apart.max()), _norm(apart) / scale
                    )


def model_differences(first: Source, second: Source) -> list[str]:
    """Values of the network's configuration that differ, a line each."""
    lines = []
    others = dataclasses.asdict(second.model.flags())
    for name, here in dataclasses.asdict(first.model.flags()).items():
        if here != others[name] and name != "padded_vocab_size":
            lines.append(f"{name}: {json.dumps(here)} and {json.dumps(others[name])}")
    return lines


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
