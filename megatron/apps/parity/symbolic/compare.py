"""Comparison of each rank's results with those of one process.

Shapes: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.apps.parity.symbolic.groups import Fault
from megatron.apps.parity.symbolic.program import RankOutcome
from megatron.checkpoint.slices import Slice, tiles
from megatron.parallel.context import Context
from megatron.parallel.mesh import Coordinates, Group

BOUND = 1e-8
"""Allowed error of a float64 value, relative to the largest value in its tensor. Correct programs
with a hundred layers and other summation orders differ by 1e-12, wrong ones by a few percent."""
_SMALL = 1e-6
"""Minimum scale for gradient errors, as a fraction of the model's largest gradient. It matters for
key biases, whose gradient is zero in theory."""


@dataclass
class Observed:
    """A module's output on one process, and its index in the order of computation."""

    order: int
    output: Tensor


@dataclass(order=True)
class Wrong:
    """A tensor that differs from one process. Instances sort by the order of computation."""

    order: int
    rank: int
    what: str = field(compare=False)

    def __str__(self) -> str:
        return self.what


def tensor_of(output: Any) -> Tensor | None:
    """Return the activations [B, S, any] in a module's output, or None if it has none."""
    if hasattr(output, "total"):
        output = output.total
    if isinstance(output, tuple):
        output = output[0]
    if isinstance(output, Tensor) and output.is_floating_point() and output.dim() == 3:
        return output
    return None


def placed(output: Tensor, whole: Tensor, at: Coordinates) -> float | None:
    """Return the distance, relative to the largest value, between a rank's activations and its part
    of one process's activations. This is all of them, or a slice along the sequence, the features,
    or both. Return None if the shapes do not determine the part."""
    place, places = at.get("context", (0, 1))
    if places > 1:
        if whole.shape[1] % (2 * places):
            return None
        whole = Context(Group(tuple(range(places)), place)).take(whole, 1)
    rank, size = at.get("tensor", (0, 1))
    if output.shape[0] != whole.shape[0]:
        return None
    if output.shape[1] != whole.shape[1]:
        if output.shape[1] * size != whole.shape[1]:
            return None
        whole = whole.chunk(size, 1)[rank]
    features = output.shape[2] != whole.shape[2]
    if features:
        if output.shape[2] * size != whole.shape[2]:
            return None
        whole = whole.chunk(size, 2)[rank]
    scale = max(float(whole.abs().max()), 1e-300)
    distance = float((output - whole).abs().max()) / scale
    if features and not distance <= BOUND:
        return None  # several matrices in one tensor, each sharded separately
    return distance if math.isfinite(distance) else math.inf


@dataclass
class PlainStep:
    """A step on one process: full gradients, weights and buffers by canonical name."""

    loss: float
    norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    options: dict[str, tuple[Any, ...]]
    buffers: dict[str, Tensor]
    outputs: dict[tuple[str, int], Observed]

    @classmethod
    def of(cls, outcome: RankOutcome, outputs: dict[tuple[str, int], Observed]) -> PlainStep:
        shares = outcome.shares
        return cls(
            outcome.loss,
            outcome.norm,
            {s.name: s.shard.join([s.grad]) for s in shares if s.grad is not None},
            {s.name: s.shard.join([s.weight]) for s in shares},
            {s.name: s.options for s in shares},
            outcome.buffers,
            outputs,
        )


def check_outcomes(outcomes: Sequence[RankOutcome], reference: PlainStep) -> None:
    """Compare loss, gradients, norm, optimizer options and buffers of all ranks with one process.
    Raises Fault for the first difference, in the order in which a step computes them."""
    allowed = BOUND * max(abs(reference.loss), 1e-300)
    for each in outcomes:
        if not abs(each.loss - reference.loss) <= allowed:
            raise Fault(f"loss {each.loss:.9g} on rank {each.rank}, {reference.loss:.9g} expected")
    _check_gradients(outcomes, reference)
    for each in outcomes:
        if not abs(each.norm - reference.norm) <= BOUND * reference.norm:
            raise Fault(
                f"gradient norm {each.norm:.9g} on rank {each.rank}, {reference.norm:.9g} "
                "expected, although all gradients agree: a parameter is counted twice or not at all"
            )
        for share in each.shares:
            if share.options != reference.options[share.name]:
                raise Fault(
                    f"optimizer group of {share.name} on rank {each.rank}: {share.options} "
                    f"instead of {reference.options[share.name]}"
                )
        for name, values in each.buffers.items():
            if not torch.allclose(values, reference.buffers[name], rtol=1e-5, atol=1e-7):
                raise Fault(f"buffer {name} on rank {each.rank} differs after the step")


def _check_gradients(outcomes: Sequence[RankOutcome], reference: PlainStep) -> None:
    largest = max(float(grad.abs().max()) for grad in reference.grads.values())
    counted = dict.fromkeys(reference.grads, 0)
    for name in reversed(reference.grads):  # in the order of the backward pass
        whole = reference.grads[name]
        allowed = BOUND * max(float(whole.abs().max()), _SMALL * largest)
        for each in outcomes:
            for share in each.shares:
                if share.name != name:
                    continue
                if share.grad is None:
                    raise Fault(f"gradient of {name} on rank {each.rank} is missing")
                expected = share.shard.cut(whole, each.coordinates)
                if share.grad.shape != expected.shape:
                    raise Fault(
                        f"gradient of {name} on rank {each.rank}: shape {tuple(share.grad.shape)} "
                        f"instead of {tuple(expected.shape)}"
                    )
                counted[name] += share.owned * expected.numel()
                off = float((share.grad - expected).abs().max()) if expected.numel() else 0.0
                if not off <= allowed:
                    factor = _factor(share.grad, expected)
                    raise Fault(
                        f"gradient of {name} on rank {each.rank} ({_where(each.coordinates)}): "
                        f"{off:.1e} off, {allowed:.1e} allowed{factor}"
                    )
    _check_count(outcomes, reference)


def _check_count(outcomes: Sequence[RankOutcome], reference: PlainStep) -> None:
    """Check that one replica's ranks count each element of the model once in the gradient norm."""
    first = {axis: 0 for axis in ("data", "context")}  # other replicas compute their own norms
    for name, whole in reference.grads.items():
        total = 0
        for each in outcomes:
            if all(each.coordinates[axis][0] == place for axis, place in first.items()):
                for share in each.shares:
                    if share.name == name and share.owned:
                        kept = share.shard.cut(torch.ones_like(whole), each.coordinates)
                        total += int(kept.sum())
        if total != whole.numel():
            raise Fault(
                f"{name}: the ranks of a replica count {total} elements in the norm of its "
                f"gradients, and it has {whole.numel()}"
            )


def _factor(values: Tensor, expected: Tensor) -> str:
    """Describe a gradient that is a multiple of the expected one. Return "" for other gradients."""
    norm = float(expected.pow(2).sum())
    ratio = float((values * expected).sum()) / norm if norm else 0.0
    rest = float((values - ratio * expected).abs().max())
    if math.isfinite(ratio) and rest <= 1e-6 * float(values.abs().max()):
        return f": it is {ratio:.6g} times the expected one"
    return ""


def _where(coordinates: Mapping[str, tuple[int, int]]) -> str:
    wide = (f"{axis} {place} of {size}" for axis, (place, size) in coordinates.items() if size > 1)
    return ", ".join(wide) or "the only rank"


def check_slices(outcomes: Sequence[RankOutcome], reference: PlainStep) -> None:
    """Compare the slices of a checkpoint with whole parameters. Raises Fault for the first
    parameter with a wrong slice, or whose elements are not covered exactly once."""
    for name, whole in {**reference.weights, **reference.buffers}.items():
        pieces: dict[str, list[Slice]] = {}
        for each in outcomes:
            for saved in each.slices:
                if saved.name != name:
                    continue
                pieces.setdefault(saved.part, []).append(saved.slice)
                expected = saved.slice.cut(whole.float())
                same = expected.shape == saved.values.shape and torch.allclose(
                    expected, saved.values.float(), rtol=1e-5, atol=1e-7
                )
                if not same:
                    raise Fault(
                        f"checkpoint slice [{saved.slice.start}, {saved.slice.end}) of {name} of "
                        f"rank {each.rank} has other elements than its description says"
                    )
        covered = sum(piece.numel for part in pieces.values() for piece in part)
        whole_once = covered == whole.numel() and _disjoint(whole, pieces)
        if not whole_once:
            raise Fault(
                f"checkpoint slices of {name} cover {covered} of {whole.numel()} elements, or some "
                "of them twice"
            )


def _disjoint(whole: Tensor, pieces: Mapping[str, Sequence[Slice]]) -> bool:
    if len(pieces) == 1:
        return tiles(tuple(whole.shape), next(iter(pieces.values())))
    counts = torch.zeros(whole.numel(), dtype=torch.int64)
    numbers = torch.arange(whole.numel()).view(whole.shape)
    for part in pieces.values():
        for piece in part:
            counts[piece.cut(numbers)] += 1
    return bool((counts == 1).all())
