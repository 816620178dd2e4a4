"""The tensor-parallel region: how activations enter and leave layers that are cut over ranks.

Outside, every rank holds the whole activations or, with sequence parallelism, its slice of the
sequence; inside, the whole sequence and a share of the features.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import Tensor

from megatron.parallel.collectives import reduce_from_ranks, scatter_to_ranks, sum_gradients
from megatron.parallel.mesh import SINGLE, Coordinates, Group
from megatron.parallel.random import tensor_parallel_random


@dataclass(frozen=True)
class TensorParallel:
    """Over which ranks layers are cut, and how activations lie between them.

    Attributes:
        group: the tensor-parallel group.
        sequence: whether activations outside the cut layers are split along the sequence.
    """

    group: Group = SINGLE
    sequence: bool = False

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place among them, for parameters that are cut over them."""
        return {"tensor": (self.group.rank, self.group.size)}

    @property
    def slices(self) -> int:
        """How many slices the sequence is in outside."""
        return self.group.size if self.sequence else 1

    @property
    def split(self) -> bool:
        """Whether a rank holds only a slice of the sequence outside."""
        return self.slices > 1

    def leave(self, x_BSO: Tensor) -> Tensor:
        """Takes a rank's addend out of the cut layers, into which ``column_linear`` takes inputs:
        the sum over ranks, or this rank's slice [B, S/t, O] of it.

        ``x_BSO`` may be overwritten; nothing else may need it.
        """
        if self.split:
            return scatter_to_ranks(x_BSO, self.group)
        return x_BSO if self.group.size == 1 else reduce_from_ranks(x_BSO, self.group)

    def shared(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Parameters for use outside: where every rank applies them to its slice only, their
        gradients are summed over the ranks, with one collective for all that are given together."""
        return sum_gradients(params, self.group) if self.split else params

    def over_heads(self, *params: Tensor) -> tuple[Tensor, ...]:
        """Parameters for use inside, by which every rank treats each of its heads alike: their
        gradients are summed over the ranks. Where ranks hold the same key head, each has the part
        of the gradient that comes from its own queries, so that the sum counts nothing twice."""
        return params if self.group.size == 1 else sum_gradients(params, self.group)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """What belongs to the sequence positions that this rank holds outside, of a tensor that is
        the same on every rank; ``dim`` is its sequence dimension."""
        return x.chunk(self.group.size, dim)[self.group.rank] if self.split else x

    def random(self) -> contextlib.AbstractContextManager[None]:
        """Random numbers for activations outside: the ranks' differ if what they hold does."""
        return tensor_parallel_random(self.group) if self.split else contextlib.nullcontext()
