"""Random bits for stochastic rounding, as a function of seed, update, parameter and element.

A counter-based generator: a hash in 32-bit integer arithmetic, which torch.compile fuses into the
update. There is no state to save. An element is known by its parameter's name and its place in a
tensor-parallel rank's share, so bits do not depend on how data-parallel ranks divide a share, and
copies of a parameter on several ranks or pipeline stages stay equal.
"""

from __future__ import annotations

import zlib

from torch import Tensor

from megatron.engine.update.partition_update import wrapped
from megatron.parallel.mesh import Coordinates
from megatron.parallel.shard import Shard

_MULTIPLIERS = (0x7FEB352D, -0x7B935975)
"""Of the hash "lowbias32" (the second is 0x846ca68b), as int32."""
_GOLDEN = -0x61C8864F
"""2**32 over the golden ratio, as int32."""


def key_of(seed: int, name: str, shard: Shard, coordinates: Coordinates) -> int:
    """The identifier (int32) of the first element of a rank's share of a parameter."""
    words = f"{seed} {name} {sorted(shard.ranges(coordinates).items())}"
    return wrapped(zlib.crc32(words.encode()))


def random_bits(elements: Tensor, step: Tensor) -> Tensor:
    """Random bits of elements in an update, 32 of each.

    Args:
        elements: identifiers, int32 [numel]: a key and the place in the share, added up.
        step: number of the update, an int32 scalar.
    """
    first, second = _MULTIPLIERS
    counted = _folded(step * _GOLDEN, 16) * second
    bits = _folded(elements, 16) * first
    return _folded(_folded(bits ^ counted, 15) * second, 16)


def more_bits(bits: Tensor) -> Tensor:
    """As many random bits again, of those of the same elements."""
    return _folded((bits ^ _GOLDEN) * _MULTIPLIERS[0], 15)


def _folded(bits: Tensor, shift: int) -> Tensor:
    """``bits ^ (bits >> shift)``, shifted without the sign."""
    return bits ^ ((bits >> shift) & ((1 << (32 - shift)) - 1))
