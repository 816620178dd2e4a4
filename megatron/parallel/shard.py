"""Sharding of parameters over the mesh.

Initialisation, gradient norm, checkpoints, conversion and the parity tests all use this
description. No other code depends on how a layout shards a parameter.
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
"""Ranges (start, length) along a dimension of a whole parameter, in their order within a share."""


@dataclass(frozen=True)
class Cut:
    """Sharding of one dimension of a parameter over one or several axes of the mesh.

    Attributes:
        axis: name of an axis, or of several, slowest first, that together number the ranks.
        parts: lengths along ``dim`` of the matrices fused into this parameter, for example (query,
          key, value). Each is sharded separately. Empty means a single matrix.
        held: indices of the matrices in this parameter; another one has the others. None for all.
        copies: number of neighbouring ranks with the same share.
        unpadded: length along ``dim`` without padding. None if there is no padding.
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
        """Return a rank's (index, number of ranks) along all of the cut's axes together."""
        rank, size = 0, 1
        for axis in self.axes:
            place, count = coordinates.get(axis, (0, 1))
            rank, size = rank * count + place, size * count
        return rank, size

    def ranges(self, length: int, coordinates: Coordinates) -> Ranges:
        """Return a rank's ranges along this dimension, whose length with padding is ``length``."""
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
    """Sharding of one parameter over the mesh. ``full_shape`` includes padding; the tensor itself
    may be empty (``zero.Init``). No two of ``cuts`` share an axis. If a checkpoint joins this
    parameter with others, ``whole`` is the last component of the joint parameter's name."""

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
        """Axes along which the parameter is replicated. Its gradient is averaged over them."""
        return tuple(axis for axis in REPLICAS if self.over(axis) is None)

    @property
    def decays(self) -> bool:
        """True for matrices, which have weight decay, False for vectors. For a parameter with
        several experts, the dimensions of a single expert count."""
        return len(self.full_shape) - (self.over("expert") is not None) > 1

    @property
    def part(self) -> str:
        """Label that distinguishes several parts of one parameter. Empty for a whole parameter."""
        held = [part for cut in self.cuts for part in cut.held or ()]
        return "parts" + "-".join(map(str, held)) if held else ""

    def over(self, axis: str) -> Cut | None:
        """Return the cut over an axis, or None if the parameter is replicated along it."""
        return next((cut for cut in self.cuts if axis in cut.axes), None)

    def ranges(self, coordinates: Coordinates = ALONE) -> dict[int, Ranges]:
        """Return the ranges of a rank's share of the full parameter, by sharded dimension."""
        return {cut.dim: cut.ranges(self.full_shape[cut.dim], coordinates) for cut in self.cuts}

    def local_shape(self, coordinates: Coordinates = ALONE) -> tuple[int, ...]:
        shape = list(self.full_shape)
        for dim, ranges in self.ranges(coordinates).items():
            shape[dim] = sum(length for _, length in ranges)
        return tuple(shape)

    def counted(self, coordinates: Coordinates, among: Sequence[str] = AXES) -> bool:
        """Return whether a rank's copy counts in norms and checkpoints. Of the ranks with the same
        values along the axes ``among``, the first counts. Pipeline stages share no values."""
        for axis in among:
            rank, _ = coordinates.get(axis, (0, 1))
            if rank and axis != "pipeline":
                cut = self.over(axis)
                if cut is None or rank % cut.copies:
                    return False
        return True

    def cut(self, canonical: Tensor, coordinates: Coordinates = ALONE) -> Tensor:
        """Return one rank's share of a whole, unpadded parameter. Padding is filled with zeros."""
        assert tuple(canonical.shape) == self.canonical_shape, (canonical.shape, self)
        share = canonical
        for dim, ranges in self.ranges(coordinates).items():
            pieces = [_taken(share, dim, *bounds) for bounds in ranges]
            share = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return share

    def place(self, canonical: Tensor, share: Tensor, coordinates: Coordinates = ALONE) -> None:
        """Write one rank's share into a whole, unpadded parameter."""
        assert tuple(canonical.shape) == self.canonical_shape, (canonical.shape, self)
        blocks = [(canonical, share)]
        for dim, ranges in self.ranges(coordinates).items():
            blocks = [
                pair for whole, values in blocks for pair in _matched(whole, values, dim, ranges)
            ]
        for whole, piece in blocks:
            whole.copy_(piece)

    def join(self, shares: Sequence[Tensor], sizes: Mapping[str, int] | None = None) -> Tensor:
        """Return the whole, unpadded parameter. ``shares`` are those of all ranks, in order, of a
        mesh with ``sizes`` (None for one process). Not available for a part of a parameter."""
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
    """Distribution of initial values: normal around 0 with standard deviation ``std``, uniform
    between ``-bound`` and ``bound``, Xavier uniform with the bound that the whole parameter's two
    dimensions determine (Glorot and Bengio 2010), ``function`` of uniform values between 0 and 1,
    or constant."""

    std: float = 0.0
    constant: float = 0.0
    bound: float = 0.0
    xavier: bool = False
    function: Callable[[Tensor], Tensor] | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return self.fill(torch.empty(tuple(shape)), generator)

    def fill(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Fill a whole parameter (float32, on the CPU) with its initial values."""
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
    """Return the initialisation of a network's matrices. Set ``scaled`` for matrices whose outputs
    are added to the residual stream."""
    if config.init_method_xavier_uniform:
        return Init(xavier=True)
    return Init(config.init_method_std / ((2 * config.num_layers) ** 0.5 if scaled else 1.0))


class Buffer:
    """Values of a layer that are updated by a rule instead of a gradient. They are always float32,
    equal on all ranks that have the layer, and saved in checkpoints like a weight. They are not
    registered with torch, so that no engine casts or partitions them.
    """

    def __init__(self, *shape: int) -> None:
        self.shard = Shard(shape)
        self.values = torch.zeros(shape)

    def start(self, device: torch.device) -> None:
        """Set the values to zeros on a device."""
        self.values = torch.zeros(self.shard.full_shape, dtype=torch.float32, device=device)


def parameter(
    shard: Shard, init: Init, coordinates: Coordinates = ALONE, summed: bool = False
) -> nn.Parameter:
    """Return an uninitialised parameter, the share of the rank at ``coordinates``, with ``shard``
    and ``init`` attached. ``summed`` marks its gradient as partial on each tensor-parallel rank."""
    param = nn.Parameter(torch.empty(shard.local_shape(coordinates)))
    param.shard = shard  # type: ignore[attr-defined]
    param.init = init  # type: ignore[attr-defined]
    param.summed = summed  # type: ignore[attr-defined]
    # DeepSpeed's gradient norm counts a parameter without this mark only on tensor-parallel rank 0.
    param.tensor_model_parallel = shard.counted(coordinates, ("tensor",))  # type: ignore[attr-defined]
    return param


def shard_of(param: nn.Parameter) -> Shard:
    return param.shard  # type: ignore[attr-defined]


def init_of(param: nn.Parameter) -> Init:
    return param.init  # type: ignore[attr-defined]
