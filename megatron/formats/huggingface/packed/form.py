"""A quantised weight that is stored as several tensors: integers, scales and zero points.

Shapes: O outputs and I inputs of a linear layer, whose weight is [O, I]; G groups of inputs that
share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


class StoredParts:
    """The tensors that store one weight, by role. They are read on access. A missing one raises
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
        """Read the tensor with a role. Return None if it is missing."""
        return self[role] if role in self.names else None  # noqa: SIM401

    def shape(self, role: str) -> Shape:
        """Return the shape of the tensor with a role, without reading its data."""
        return self._shape(self._name(role))

    def _name(self, role: str) -> str:
        if role not in self.names:
            raise ValueError(f"its {role} are missing")
        return self.names[role]


@dataclass(frozen=True)
class PackedForm:
    """Description of how one weight is stored in several tensors.

    Attributes:
        ends: suffix of each tensor's name, by role. The first role is always present.
        shape: returns the weight's shape, reading only small tensors. Raises ValueError if the
            tensors do not fit each other.
        unpack: returns the weight in a floating-point dtype. Raises ValueError in the same cases.
        name: suffix of the weight's own name.
        needs: roles of which at least one must be present for a weight to have this form.
        dtype: dtype of the unpacked weight.
    """

    ends: Mapping[str, str]
    shape: Callable[[StoredParts], Shape]
    unpack: Callable[[StoredParts], Tensor]
    name: str = ".weight"
    needs: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def claim(self, names: set[str]) -> dict[str, dict[str, str]]:
        """Find the weights that have this form. Return, by weight name, the names of the weight's
        tensors by role. ``names`` are the names of all tensors of a model."""
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
    """Return the two sizes in ``shape``. Raises ValueError if it is not two-dimensional."""
    if len(shape) != 2:
        raise ValueError(f"its {what} must be a matrix, not {shape}")
    return shape[0], shape[1]


def require(shape: Shape, expected: Shape, what: str) -> None:
    """Raise ValueError if ``shape`` is not the expected one."""
    if shape != expected:
        raise ValueError(f"its {what} must have the shape {expected}, not {shape}")


def unpacked_bits(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack non-negative integers of ``bits`` bits from int32 words along a dimension, the lowest
    bits first. Return int32. Raises ValueError if ``packed`` has another dtype."""
    if packed.dtype != torch.int32:
        raise ValueError(f"packed numbers must be int32, not {packed.dtype}")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    wide = packed.unsqueeze(-1) >> shifts & (1 << bits) - 1  # [..., 32 / bits]
    return wide.flatten(-2) if dim == 1 else wide.transpose(-1, -2).flatten(0, 1)


def groups_of(inputs: int, groups: int, index: Tensor | None, size: int | None = None) -> Tensor:
    """Return the index of each input's group, [I]: the stored ``index``, or consecutive groups
    of ``size`` inputs. Raises ValueError if an index is out of range or the number of groups is
    wrong."""
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
    """Return the number of elements in a shape. Raises ValueError if it is negative or above
    2^48."""
    if any(size < 0 for size in shape) or math.prod(shape) > 2**48:
        raise ValueError(f"a weight cannot have the shape {shape}")
    return math.prod(shape)
