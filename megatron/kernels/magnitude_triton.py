"""Maximum magnitude (amax) of the values that a Triton kernel writes, for a later cast to 8 bits.

Magnitudes are compared by their bits. As integers, these have the order of the numbers, with NaN
above all, as in torch's ``amax``. The maximum does not depend on the order of the programs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(values):
    """Return the bits, as int32, of the values' magnitudes in float32."""
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_largest(largest, bits):
    """Raise the float32 amax stored at ``largest`` to the maximum of magnitudes given as bits."""
    most = tl.max(tl.reshape(bits, [bits.numel]), 0)
    at = largest.to(tl.pointer_type(tl.int32), bitcast=True)
    # The stored amax only grows, so a stale read merely costs one more atomic operation. Almost
    # every program finds a larger amax there, so that few atomic operations compete.
    if most > tl.load(at):
        tl.atomic_max(at, most)
