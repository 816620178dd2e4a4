"""How many rows go through a model together, so that a row's results do not depend on the others.

On CPUs a row of a GEMM usually has the same bits in every product of four or more rows. Whether it
has here is tried with the model's own shapes; where it has not, all products have one number of
rows. On other devices nothing is promised.

Shapes: M rows of a product, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.mesh import Group

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

    def agreed(self, group: Group) -> RowRule:
        """The strictest rule of the ranks of a replica, whose stages have other weights: all of
        them must have the same rows."""
        rules: list[RowRule] = [self] * group.size
        if group.size > 1:
            dist.all_gather_object(rules, self, group=group.handle)
        most = [rule.most for rule in rules if rule.most is not None]
        return RowRule(
            max(rule.fewest for rule in rules),
            min(most, default=None),
            max(rule.spare for rule in rules),
        )

    @classmethod
    def of(cls, weights: Iterable[Tensor], known: Callable[[Tensor], bool]) -> RowRule:
        """For a model with these weights [O, I], of which some are ``known`` to give independent
        rows."""
        shapes = {(*weight.shape, weight.dtype, weight.device.type): weight for weight in weights}
        spare = int(any(outputs % _VECTOR for outputs, *_ in shapes))
        for (outputs, inputs, dtype, device), weight in shapes.items():
            if device != "cpu" or known(weight):
                continue
            product = partial(F.linear, weight=some_weight(outputs, inputs, dtype))
            if not independent(product, inputs, dtype):
                return cls(_TILE, _TILE, spare)
        return cls(spare=spare)


def some_weight(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """A weight to try products with, on the CPU."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(min(outputs, _OUTPUTS), inputs, generator=random).to(dtype)


@torch.inference_mode()
def independent(product: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype) -> bool:
    """Whether rows of a product do not depend on their number."""
    x_MI = some_weight(max(_TRIED) + 1, inputs, dtype)
    whole_MO = product(x_MI)
    return all(
        torch.equal(product(x_MI[first : first + rows]), whole_MO[first : first + rows])
        for rows in _TRIED
        for first in (0, 1)
    )
