"""A parameter says how it is cut.

Initialisation, gradient norm, checkpoints, conversion and the parity tests all read this
description; no other place knows a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from megatron.parallel.mesh import Group


@dataclass(frozen=True)
class Shard:
    """How one parameter is cut over the tensor-parallel ranks.

    Attributes:
        full_shape: shape of the whole parameter, padding included. (Under ``zero.Init`` the tensor
            itself is empty, so the shape has to be known from here.)
        dim: the dimension that is cut; None when every rank holds the whole parameter.
        parts: lengths along ``dim`` of matrices fused into this one, for example
            (query, key, value); each part is cut by itself. Empty means one part.
        unpadded: length along ``dim`` without padding; None when nothing is padded.
        held: which of the parts this parameter holds, by number; None for all. What is left is in
            another parameter of the same layer.
        copies: how many neighbouring ranks hold the same share.
        whole: last name of the whole parameter where it is held in several, each of which has a
            name of its own.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    parts: tuple[int, ...] = ()
    unpadded: int | None = None
    held: tuple[int, ...] | None = None
    copies: int = 1
    whole: str | None = None

    def __post_init__(self) -> None:
        if self.dim is None:
            plain = not self.parts and self.unpadded is None and self.copies == 1
            assert plain and self.held is None, "only a cut dimension has these"
        else:
            assert not self.parts or sum(self.parts) == self.full_shape[self.dim]

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter without padding; what checkpoints speak of."""
        if self.unpadded is None:
            return self.full_shape
        assert self.dim is not None
        return (*self.full_shape[: self.dim], self.unpadded, *self.full_shape[self.dim + 1 :])

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of one rank's share, padding included."""
        if self.dim is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.dim] = sum(length for _, length in self.ranges(0, size))
        return tuple(shape)

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Where rank ``rank`` of ``size``'s share lies in the whole: (start, length) along ``dim``,
        in the order in which the share holds them, padding included."""
        if self.dim is None:
            return []
        parts = self.parts or (self.full_shape[self.dim],)
        starts = [0, *accumulate(parts)]
        assert size % self.copies == 0, (self, size)
        place, places = rank // self.copies, size // self.copies
        held = range(len(parts)) if self.held is None else self.held
        assert all(parts[part] % places == 0 for part in held), (self, size)
        widths = [parts[part] // places for part in held]
        return [
            (starts[part] + place * width, width) for part, width in zip(held, widths, strict=True)
        ]

    def counted(self, rank: int, size: int) -> bool:
        """Whether this rank's copy counts, in norms and checkpoints: of ranks that hold the same
        values the first one's does."""
        return rank % (size if self.dim is None else self.copies) == 0

    def cut(self, canonical: Tensor, rank: int, size: int) -> Tensor:
        """One rank's share of a whole parameter without padding; padding is filled with zeros."""
        assert tuple(canonical.shape) == self.canonical_shape, (canonical.shape, self)
        if self.dim is None:
            return canonical
        if self.unpadded is not None:
            padding = list(canonical.shape)
            padding[self.dim] = self.full_shape[self.dim] - self.unpadded
            canonical = torch.cat([canonical, canonical.new_zeros(padding)], self.dim)
        pieces = [canonical.narrow(self.dim, *r) for r in self.ranges(rank, size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def place(self, canonical: Tensor, share: Tensor, rank: int, size: int) -> None:
        """Writes one rank's share into a whole parameter without padding; inverse of :meth:`cut`.

        What the share does not hold stays as it is.
        """
        assert tuple(canonical.shape) == self.canonical_shape, (canonical.shape, self)
        if self.dim is None:
            canonical.copy_(share)
            return
        end, taken = self.canonical_shape[self.dim], 0
        for start, length in self.ranges(rank, size):
            kept = max(0, min(length, end - start))
            if kept:
                target = canonical.narrow(self.dim, start, kept)
                target.copy_(share.narrow(self.dim, taken, kept))
            taken += length

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole parameter without padding, from the shares of all ranks in order; for a
        parameter that is held in one."""
        assert self.held is None, self
        canonical = shares[0].new_empty(self.canonical_shape)
        for rank, share in enumerate(shares):
            self.place(canonical, share, rank, len(shares))
        return canonical


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: normal with this deviation around 0, or a constant."""

    std: float = 0.0
    constant: float = 0.0

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Initial values (float32, CPU) of a whole parameter."""
        return self.fill(torch.empty(tuple(shape)), generator)

    def fill(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """Writes the initial values of a whole parameter into ``values`` (float32, CPU)."""
        if self.std:
            return values.normal_(0.0, self.std, generator=generator)
        return values.fill_(self.constant)


def parameter(shard: Shard, init: Init, group: Group) -> nn.Parameter:
    """An uninitialised parameter: this rank's share, with its descriptions attached.

    Args:
        shard: how it is cut.
        init: initial values.
        group: the ranks over which it is cut.
    """
    param = nn.Parameter(torch.empty(shard.local_shape(group.size)))
    param.shard = shard  # type: ignore[attr-defined]
    param.init = init  # type: ignore[attr-defined]
    # DeepSpeed's gradient norm takes a parameter without this mark on tensor rank 0 only.
    param.tensor_model_parallel = shard.counted(group.rank, group.size)  # type: ignore[attr-defined]
    return param


def shard_of(param: nn.Parameter) -> Shard:
    """How a parameter is cut."""
    return param.shard  # type: ignore[attr-defined]


def init_of(param: nn.Parameter) -> Init:
    """Initial values of a parameter."""
    return param.init  # type: ignore[attr-defined]
