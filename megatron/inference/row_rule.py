"""How many rows go through a model together, so that a row's results do not depend on the others.

On CPUs a row of a GEMM has the same bits in every product of four or more rows. Whether it
has here is tried with the model's own shapes; where it has not, all products have one number of
rows. On other devices nothing is promised.

Shapes: M rows of a product, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.inference.packed_weights import PackedWeights, packed, packed_linear

_FEWEST = 4
_TILE = 32
_TRIED = (4, 5, 7, 8, 13, 16, 31, 33, 64)
_OUTPUTS = 4096
"""Of a product that is tried."""
_VECTOR = 32
"""Numbers that elementwise kernels of CPUs take at a time; the rest of a tensor, at its end, is
computed by other code."""


@dataclass(frozen=True)
class RowRule:
    """The rows of a pass.

    Attributes:
        fewest: others are added to fewer.
        most: of a pass; None for any number.
        spare: rows that are added to any number, so that no row that counts is the last.
    """

    fewest: int = _FEWEST
    most: int | None = None
    spare: int = 0

    def padded(self, rows: int) -> int:
        """The rows of a pass of which so many count."""
        return max(self.fewest, rows) + self.spare

    @classmethod
    def of(cls, weights: Iterable[Tensor], packed_weights: PackedWeights) -> RowRule:
        """For a model with these weights [O, I]."""
        shapes = {
            (tuple(weight.shape), weight.dtype, weight.device.type, weight in packed_weights)
            for weight in weights
        }
        spare = int(any(outputs % _VECTOR for (outputs, _), *_ in shapes))
        if all(independent(*each) for each in shapes):
            return cls(spare=spare)
        return cls(_TILE, _TILE, spare)


@torch.inference_mode()
def independent(
    shape: tuple[int, int], dtype: torch.dtype, device: str, is_packed: bool = False
) -> bool:
    """Whether rows of products with a weight of this shape do not depend on their number."""
    if device != "cpu":
        return True
    random = torch.Generator().manual_seed(1)
    x_MI = torch.randn(max(_TRIED) + 1, shape[1], generator=random).to(dtype)
    weight_OI = torch.randn(min(shape[0], _OUTPUTS), shape[1], generator=random).to(dtype)
    product, weight = (packed_linear, packed(weight_OI)) if is_packed else (F.linear, weight_OI)
    whole_MO = product(x_MI, weight)
    return all(
        torch.equal(product(x_MI[first : first + rows], weight), whole_MO[first : first + rows])
        for rows in _TRIED
        for first in (0, 1)
    )
