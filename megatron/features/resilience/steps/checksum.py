"""Checksum of a tensor's bits, computed on the tensor's device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BLOCK = 2**14  # elements per block; a table with a factor for each fits into a core's cache

_ROWS = {"cpu": 4}
"""Blocks per operation. They must fit into a CPU's cache. Other devices use 1024, or 16M
elements."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(values: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as a flat tensor of integers of the same width."""
    return values.detach().reshape(-1).view(_BITS[values.element_size()])


@torch.no_grad()
def checksum(values: Tensor, start: int = 0) -> Tensor:
    """Return the checksum of a tensor as an int64 scalar on the tensor's device.

    It is the sum, modulo 2**64, of every element's bits times an odd factor that depends on the
    element's position. ``start`` is the position of the first element. The checksums of consecutive
    ranges add up to the checksum of the whole, and zeros add nothing."""
    bits = bits_of(values)
    # An odd factor keeps a 64-bit sign bit at 2**63, so two flipped signs would cancel.
    if bits.dtype == torch.int64:
        bits, start = bits.view(torch.int32), 2 * start
    count, place = bits.numel(), start % _BLOCK
    if not count:
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    factors = _of_places(bits.device)
    head = min(count, -start % _BLOCK)
    body = (count - head) // _BLOCK * _BLOCK
    block, sums = start // _BLOCK, list[Tensor]()
    if head:
        sums.append((bits[:head] * factors[place : place + head]).sum().view(1))
        block += 1
    whole, most = bits[head : head + body].view(-1, _BLOCK), _ROWS.get(bits.device.type, 1024)
    sums += [(some * factors).sum(1) for some in whole.split(most) if len(some)]
    if head + body < count:
        rest = bits[head + body :]
        sums.append((rest * factors[: len(rest)]).sum().view(1))
    of_blocks = torch.cat(sums)
    first = block - 1 if head else block
    numbers = torch.arange(first, first + len(of_blocks), device=bits.device)
    return (of_blocks * _mixed(numbers + _BLOCK)).sum()


@cache
def _of_places(device: torch.device) -> Tensor:
    return _mixed(torch.arange(_BLOCK, device=device))


def _mixed(numbers: Tensor) -> Tensor:
    """Return odd 64-bit hashes of the numbers: splitmix64's last steps, in wrapping arithmetic."""
    x = (numbers + 1) * -0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift right logically: vacated bits are filled with zeros."""
    return (x >> places) & ((1 << (64 - places)) - 1)
