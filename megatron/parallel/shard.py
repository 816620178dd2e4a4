"""Division of a parameter over the mesh.

Initialisation, gradient norm, checkpoints, conversion and the parity tests all read this
description; nothing else knows a layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.parallel.mesh import ALONE, AXES, REPLICAS, Coordinates, coordinates_of

Ranges = tuple[tuple[int, int], ...]
"""(start, length) along a dimension of a whole parameter, in the order of a share."""


@dataclass(frozen=True)
class Cut:
    """Cut of one dimension of a parameter over an axis of the mesh, or several together.

    Attributes:
        axis: its name, or the names of several, slowest first: a rank's place is that among the
            ranks along all of them.
        parts: lengths along ``dim`` of matrices fused into this one, for example (query, key,
            value); each part is cut by itself. Empty means one part.
        held: indices of the parts in this parameter; None for all. The others are in another
            parameter of the same layer.
        copies: number of neighbouring ranks with the same share.
    """

    dim: int
    axis: str | tuple[str, ...] = "tensor"
    parts: tuple[int, ...] = ()
    held: tuple[int, ...] | None = None
    copies: int = 1
    unpadded: int | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def of(self, coordinates: Coordinates) -> tuple[int, int]:
        """(rank, size) along all of the axes at ``coordinates``."""
        rank, size = 0, 1
        for axis in self.axes:
            place, count = coordinates.get(axis, (0, 1))
            rank, size = rank * count + place, size * count
        return rank, size

    def ranges(self, length: int, coordinates: Coordinates) -> Ranges:
        """The share of the rank at ``coordinates`` along a dimension of this padded length."""
        rank, size = self.of(coordinates)
        parts = self.parts or (length,)
        starts = [0, *accumulate(parts)]
        assert size % self.copies == 0, (self, size)
        place, places = rank // self.copies, size // self.copies
        held = range(len(parts)) if self.held is None else self.held
        assert all(parts[part] % places == 0 for part in held), (self, size)
        widths = [parts[part] // places for part in held]
        return tuple(
            (starts[part] + place * width, width) for part, width in zip(held, widths, strict=True)
        )


@dataclass(frozen=True)
class Shard:
    """Division of one parameter over the mesh: ``full_shape`` includes padding (under ``zero.Init``
    the tensor itself is empty); each of ``cuts`` is over other axes; ``whole`` is the last name of
    the whole parameter where several parameters are parts of it."""

    full_shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    whole: str | None = None

    def __post_init__(self) -> None:
        for cut in self.cuts:
            assert not cut.parts or sum(cut.parts) == self.full_shape[cut.dim], self
            assert cut.copies == 1 or not {*cut.axes} & {*REPLICAS}, (
                "copies' gradients are averaged"
            )
        axes = [axis for cut in self.cuts for axis in cut.axes]
        assert len({cut.dim for cut in self.cuts}) == len(self.cuts), self
        assert len({*axes}) == len(axes), self

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter without padding, as in checkpoints."""
        shape = list(self.full_shape)
        for cut in self.cuts:
            if cut.unpadded is not None:
                shape[cut.dim] = cut.unpadded
        return tuple(shape)

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes over which the gradient is averaged: those along which it is replicated."""
        return tuple(axis for axis in REPLICAS if self.over(axis) is None)

    @property
    def decays(self) -> bool:
        """True for matrices, whose weights decay, and False for vectors; where several experts are
        one parameter, an expert's part of it decides."""
        return len(self.full_shape) - (self.over("expert") is not None) > 1

    @property
    def part(self) -> str:
        """Distinguishes the parameters that are parts of one; empty for a whole parameter."""
        held = [part for cut in self.cuts for part in cut.held or ()]
        return "parts" + "-".join(map(str, held)) if held else ""

    def over(self, axis: str) -> Cut | None:
        """The cut over an axis; None where every rank along it has the same."""
        return next((cut for cut in self.cuts if axis in cut.axes), None)

    def ranges(self, coordinates: Coordinates = ALONE) -> dict[int, Ranges]:
        """Ranges of a rank's share in the whole, by dimension that is cut."""
        return {cut.dim: cut.ranges(self.full_shape[cut.dim], coordinates) for cut in self.cuts}

    def local_shape(self, coordinates: Coordinates = ALONE) -> tuple[int, ...]:
        shape = list(self.full_shape)
        for dim, ranges in self.ranges(coordinates).items():
            shape[dim] = sum(length for _, length in ranges)
        return tuple(shape)

    def counted(self, coordinates: Coordinates, among: Sequence[str] = AXES) -> bool:
        """True if a rank's copy counts in norms and checkpoints: the first of those with the same
        values along the axes ``among`` does. Pipeline stages have other parameters."""
        for axis in among:
            rank, _ = coordinates.get(axis, (0, 1))
            if rank and axis != "pipeline":
                cut = self.over(axis)
                if cut is None or rank % cut.copies:
                    return False
        return True

    def cut(self, canonical: Tensor, coordinates: Coordinates = ALONE) -> Tensor:
        """One rank's share of a whole parameter without padding; padding is filled with zeros."""
        assert tuple(canonical.shape) == self.canonical_shape, (canonical.shape, self)
        share = canonical
        for dim, ranges in self.ranges(coordinates).items():
            pieces = [_taken(share, dim, *bounds) for bounds in ranges]
            share = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return share

    def place(self, canonical: Tensor, share: Tensor, coordinates: Coordinates = ALONE) -> None:
        """Writes one rank's share into a whole parameter without padding."""
        assert tuple(canonical.shape) == self.canonical_shape, (canonical.shape, self)
        blocks = [(canonical, share)]
        for dim, ranges in self.ranges(coordinates).items():
            blocks = [
                pair for whole, values in blocks for pair in _matched(whole, values, dim, ranges)
            ]
        for whole, piece in blocks:
            whole.copy_(piece)

    def join(self, shares: Sequence[Tensor], sizes: Mapping[str, int] | None = None) -> Tensor:
        """The whole parameter without padding, from the shares of all ranks of a mesh with
        ``sizes`` (None for one process), in order; not for a part of a parameter."""
        assert not self.part, self
        sizes = sizes or {}
        assert len(shares) == math.prod(sizes.values()), (len(shares), sizes)
        canonical = shares[0].new_empty(self.canonical_shape)
        for rank, share in enumerate(shares):
            self.place(canonical, share, coordinates_of(rank, sizes))
        return canonical


def _matched(
    whole: Tensor, values: Tensor, dim: int, ranges: Ranges
) -> Iterator[tuple[Tensor, Tensor]]:
    taken = 0
    for start, length in ranges:
        kept = min(length, whole.shape[dim] - start)
        if kept > 0:
            yield whole.narrow(dim, start, kept), values.narrow(dim, taken, kept)
        taken += length


def _taken(values: Tensor, dim: int, start: int, length: int) -> Tensor:
    size = values.shape[dim]
    kept = max(0, min(length, size - start))
    part = values.narrow(dim, min(start, size), kept)
    if kept == length:
        return part
    return F.pad(part, (0, 0) * (values.dim() - dim - 1) + (0, length - kept))


@dataclass(frozen=True)
class Init:
    """Initial values: normal around 0 with a standard deviation, uniform between ``-bound`` and
    ``bound``, with ``xavier`` uniform within a bound that follows from the two dimensions of the
    whole parameter (Glorot and Bengio 2010), ``function`` of uniform values between 0 and 1, or
    constant."""

    std: float = 0.0
    constant: float = 0.0
    bound: float = 0.0
    xavier: bool = False
    function: Callable[[Tensor], Tensor] | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return self.fill(torch.empty(tuple(shape)), generator)

    def fill(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Writes the initial values of a whole parameter (float32, on the CPU)."""
        if self.std:
            return values.normal_(0.0, self.std, generator=generator)
        if self.xavier:
            return nn.init.xavier_uniform_(values, generator=generator)
        if self.bound:
            return values.uniform_(-self.bound, self.bound, generator=generator)
        if self.function is not None:
            return values.copy_(self.function(values.uniform_(generator=generator)))
        return values.fill_(self.constant)


def initial(config: ModelConfig, scaled: bool = False) -> Init:
    """Initial weights of a network's matrices; ``scaled``: of those whose outputs are added to the
    residual stream."""
    if config.init_method_xavier_uniform:
        return Init(xavier=True)
    return Init(config.init_method_std / ((2 * config.num_layers) ** 0.5 if scaled else 1.0))


class Buffer:
    """Values of a layer that a rule changes, not a gradient. They are float32 whatever the dtype of
    the weights, the same on all ranks that have the layer, and in checkpoints like a weight. The
    module has it as an attribute, and torch does not know it, so that no engine casts or cuts it.
    """

    def __init__(self, *shape: int) -> None:
        self.shard = Shard(shape)
        self.values = torch.zeros(shape)

    def start(self, device: torch.device) -> None:
        """Set the initial values, zeros."""
        self.values = torch.zeros(self.shard.full_shape, dtype=torch.float32, device=device)


def parameter(
    shard: Shard, init: Init, coordinates: Coordinates = ALONE, summed: bool = False
) -> nn.Parameter:
    """An uninitialised parameter: the share of the rank at ``coordinates``, with ``shard`` and
    ``init`` attached; ``summed``: each tensor-parallel rank computes an addend of its gradient."""
    param = nn.Parameter(torch.empty(shard.local_shape(coordinates)))
    param.shard = shard  # type: ignore[attr-defined]
    param.init = init  # type: ignore[attr-defined]
    param.summed = summed  # type: ignore[attr-defined]
    # DeepSpeed's gradient norm counts a parameter without this mark on tensor rank 0 only.
    param.tensor_model_parallel = shard.counted(coordinates, ("tensor",))  # type: ignore[attr-defined]
    return param


def shard_of(param: nn.Parameter) -> Shard:
    return param.shard  # type: ignore[attr-defined]


def init_of(param: nn.Parameter) -> Init:
    return param.init  # type: ignore[attr-defined]
