"""A weight that is several tensors in the files: numbers of few bits, scales, zero points.

Shapes: O outputs, I inputs of a linear layer, whose weight is [O, I]; G groups of inputs that share
a scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


class StoredParts:
    """The stored tensors of one weight by role, read on access. A missing part raises
    ValueError."""

    def __init__(
        self, names: Mapping[str, str], shape: Callable[[str], Shape],
        tensor: Callable[[str], Tensor],
    ) -> None:  # fmt: skip
        self.names, self._shape, self._tensor = names, shape, tensor

    def __contains__(self, role: str) -> bool:
        return role in self.names

    def __getitem__(self, role: str) -> Tensor:
        return self._tensor(self._name(role))

    def get(self, role: str) -> Tensor | None:
        """A part; None where it is missing."""
        return self[role] if role in self.names else None  # noqa: SIM401

    def shape(self, role: str) -> Shape:
        """Shape of a part, which is not read."""
        return self._shape(self._name(role))

    def _name(self, role: str) -> str:
        if role not in self.names:
            raise ValueError(f"its {role} are missing")
        return self.names[role]


@dataclass(frozen=True)
class PackedForm:
    """A way to store a weight.

    Attributes:
        ends: ends of the names of its parts by their role; the first is always there.
        shape: the weight's, without reading more than small parts. Raises ValueError for parts that
            do not fit each other.
        unpack: the weight in a dtype of floating point. Raises ValueError likewise.
        name: end of the name of the weight itself.
        needs: roles of which one at least shows that a tensor is stored in this way.
        dtype: of what is unpacked.
    """

    ends: Mapping[str, str]
    shape: Callable[[StoredParts], Shape]
    unpack: Callable[[StoredParts], Tensor]
    name: str = ".weight"
    needs: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def claim(self, names: set[str]) -> dict[str, dict[str, str]]:
        """The parts by role, by the name of the weight, of the tensors of a model."""
        main, claimed = next(iter(self.ends.values())), {}
        for name in sorted(names):
            if not name.endswith(main):
                continue
            stem = name.removesuffix(main)
            parts = {role: stem + end for role, end in self.ends.items() if stem + end in names}
            if not self.needs or any(role in parts for role in self.needs):
                claimed[stem + self.name] = parts
        return claimed


def matrix(shape: Shape, what: str) -> tuple[int, int]:
    """The two sizes of a matrix; raises ValueError if it is none."""
    if len(shape) != 2:
        raise ValueError(f"its {what} must be a matrix, not {shape}")
    return shape[0], shape[1]


def require(shape: Shape, expected: Shape, what: str) -> None:
    """Raise ValueError for another shape than expected."""
    if shape != expected:
        raise ValueError(f"its {what} must have the shape {expected}, not {shape}")


def unpacked_bits(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The numbers, not negative, int32, that are packed in int32 along a dimension, the lowest
    bits first. Raises ValueError for another dtype."""
    if packed.dtype != torch.int32:
        raise ValueError(f"packed numbers must be int32, not {packed.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    wide = packed.unsqueeze(-1) >> shifts & (1 << bits) - 1  # [..., 32 / bits]
    return wide.flatten(-2) if dim == 1 else wide.transpose(-1, -2).flatten(0, 1)


def groups_of(inputs: int, groups: int, index: Tensor | None, size: int | None = None) -> Tensor:
    """The group of each input, [I]: ``index``, or neighbours in groups of ``size``. Raises
    ValueError for an index out of range, or if the number of groups is another."""
    if index is None:
        size = size or max(1, -(-inputs // max(groups, 1)))
        if -(-inputs // size) != groups:
            raise ValueError(f"{groups} groups of {size} are not {inputs} inputs")
        return torch.arange(inputs) // size
    require(tuple(index.shape), (inputs,), "groups of inputs")
    index = index.long()
    if inputs and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise ValueError(f"its inputs are in groups up to {int(index.max())}, of {groups}")
    return index


def elements(shape: Shape) -> int:
    """Number of elements; raises ValueError if it is negative or not possible."""
    if any(size < 0 for size in shape) or math.prod(shape) > 2**48:
        raise ValueError(f"a weight cannot have the shape {shape}")
    return math.prod(shape)
