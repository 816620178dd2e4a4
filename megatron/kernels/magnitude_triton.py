"""The largest magnitude of what a Triton kernel writes, for casts to 8 bits that follow it.

Magnitudes are compared by their bits: as integers they are in the order of the numbers, and
not-a-number is above all, as for torch's ``amax``. A maximum is the same in any order of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(values):
    """Bits, int32, of magnitudes as float32."""
    return values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_largest(largest, bits):
    """Raises the float32 at ``largest``, which is not negative, to the largest of magnitudes, given
    as bits."""
    most = tl.max(tl.reshape(bits, [bits.numel]), 0)
    at = largest.to(tl.pointer_type(tl.int32), bitcast=True)
    # The number there only grows: one that is out of date costs an operation, and no more. Almost
    # every program finds a larger one, so that few wait for each other.
    if most > tl.load(at):
        tl.atomic_max(at, most)
