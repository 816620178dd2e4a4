"""Description, comparison and verification of checkpoints in any format, and loading of their
models."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folder import complete_tags, lost_manifests
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint, nothing_at
from megatron.families import build_model
from megatron.formats.conversion.output import run_of
from megatron.model.layer_list import LayerStack
from megatron.parallel.shard import shard_of


@dataclass(frozen=True)
class TensorFacts:
    """Facts about a parameter or one of its moments (``kind``): shape without padding, stored
    dtype, norm, and whether all elements are finite. The last two are None if the tensor was not
    read."""

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
    """Yield the facts of every tensor. Without ``norms``, no tensor is read. Raises CheckpointError
    if a tensor is missing or malformed."""
    for name in _in_order(source.names()):
        for kind in source.kinds(name):
            norm = finite = None
            if norms:
                values = source.tensor(name, kind)
                norm, finite = _norm(values), bool(values.isfinite().all())
            shape = source.shape(name)
            yield TensorFacts(name, kind, shape, source.dtype(name, kind), norm, finite)


def _in_order(names: Sequence[str]) -> list[str]:
    """Sort names so that blocks are in numerical order, even if pipeline stages alternate."""
    stacks: dict[str, int] = {}

    def place(name: str) -> tuple[int, int]:
        block = re.match(r"(\D*\.)(\d+)\.", name)
        stack, number = (name, 0) if block is None else (block[1], int(block[2]))
        return stacks.setdefault(stack, len(stacks)), number

    return sorted(names, key=place)


@torch.no_grad()
def model_of(source: Source, dtype: torch.dtype, device: torch.device) -> LayerStack:
    """Load the model of an opened checkpoint, in evaluation mode. Raises CheckpointError if the
    checkpoint is damaged or incomplete."""
    source.require_model()
    with device:
        model = build_model(run_of(source).model).to(dtype)
    for name, param in model.canonical_parameters():
        param.copy_(shard_of(param).cut(source.tensor(name)))
    for name, buffer in model.canonical_buffers():
        buffer.start(device)
        buffer.values.copy_(source.tensor(name))
    return model.eval().requires_grad_(False)


def counted(source: Source) -> str:
    """Return the numbers of a model's parameters and tensors, in words."""
    names = source.names()
    return f"{sum(math.prod(source.shape(n)) for n in names):,} parameters in {len(names)} tensors"


def run_facts(source: Source) -> dict[str, Any]:
    """Return the counters, parallel layout and dtype of the run that wrote a checkpoint, as far as
    they are known."""
    keys = ("iteration", "consumed_samples", "optimizer_step")
    facts = {key: source.state[key] for key in keys if key in source.state}
    if source.run is not None:
        parallel, precision = source.run.parallel, source.run.precision
        facts["layout"] = (
            f"tensor {parallel.tensor_model_parallel_size} x "
            f"pipeline {parallel.pipeline_model_parallel_size} x "
            f"data {parallel.data_parallel_size}, ZeRO stage {source.run.engine.zero_stage}"
        )
        if parallel.pipeline_model_parallel_size > 1:
            facts["layout"] += f", {parallel.pipeline_schedule}"
        if parallel.expert_model_parallel_size > 1:
            facts["layout"] += f", experts over {parallel.expert_model_parallel_size} ranks"
        facts["trained in"] = next(
            (name for name in ("bf16", "fp16") if getattr(precision, name)), "fp32"
        )
    return facts


def model_facts(source: Source) -> dict[str, Any]:
    """Return the fields of the network's configuration that differ from their defaults."""
    flags = source.model.flags()
    values = {field: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    return {field.name: value for field, value in values.items() if value != field.default}


def files_of(checkpoint: Path) -> list[Path]:
    """Return all files of a checkpoint, or the zip archive that contains it."""
    place = next(path for path in (checkpoint, *checkpoint.parents) if path.exists())
    return [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]


def bytes_on_disk(checkpoint: Path) -> int:
    """Return the total size in bytes of all files of a checkpoint."""
    return sum(path.stat().st_size for path in files_of(checkpoint))


@dataclass(frozen=True)
class TensorDifference:
    """Difference of a tensor between two checkpoints. ``what`` describes this in words, unless only
    values differ. In that case ``largest`` is the largest absolute difference, and ``relative`` the
    norm of the difference divided by the norm in the first checkpoint."""

    name: str
    kind: str
    what: str | None = None
    largest: float = 0.0
    relative: float = 0.0


def tensor_differences(first: Source, second: Source) -> Iterator[TensorDifference]:
    """Yield the tensors that are not bitwise equal, or that only one checkpoint has. Raises
    CheckpointError if a tensor is missing or malformed."""
    ours, theirs = set(first.names()), set(second.names())
    for name in dict.fromkeys([*first.names(), *second.names()]):
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
    """Return a line for each field of the network's configuration that differs."""
    here, there = (dataclasses.asdict(source.model.flags()) for source in (first, second))
    return [
        f"{name}: {json.dumps(value)} and {json.dumps(there[name])}"
        for name, value in here.items()
        if value != there[name] and name != "padded_vocab_size"
    ]


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a checkpoint: the numbers of files, bytes and parameters, the problem
    that was found, or None, and whether a checkpoint exists at all."""

    folder: Path
    files: int = 0
    bytes: int = 0
    parameters: int = 0
    error: str | None = None
    there: bool = True


def verify_all(path: Path, every: bool = False) -> Iterator[Verdict]:
    """Verify the checkpoint that loading would choose or, with ``every``, all checkpoints in a
    folder."""
    tags: list[str | None] = []
    if every and path.is_dir():
        tags += complete_tags(path)
        for lost in lost_manifests(path) if tags else ():
            yield Verdict(path, error=lost)
    for wanted in tags or [None]:
        try:
            checkpoint = locate_checkpoint(path, wanted)
        except (ValueError, OSError) as error:
            yield Verdict(path / (wanted or ""), error=str(error))
        else:
            if checkpoint is None:
                yield Verdict(path, error=f"{path}: {nothing_at(path)}", there=False)
            else:
                yield _verified(checkpoint)
    if tags:
        # All checkpoints may be intact although the tracker names one that does not exist.
        try:
            locate_checkpoint(path)
        except (ValueError, OSError) as error:
            yield Verdict(path, error=str(error))


def _verified(found: FoundCheckpoint) -> Verdict:
    """Verify a checkpoint as loading does, and also read every tensor."""
    names, error = list[str](), None
    try:
        source = found.open()
        names = list(source.names())
        source.check_tensors()
    except (ValueError, OSError) as caught:
        error = str(caught)
    size = bytes_on_disk(found.folder)
    return Verdict(found.folder, len(files_of(found.folder)), size, len(names), error)
