"""A checksum of a tensor's bits, computed on the tensor's device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BLOCK = 2**14  # elements that share a table of factors: one that stays in a core's cache

_ROWS = {"cpu": 4}
"""Blocks per operation: on CPUs as many as stay in a cache, elsewhere 16 million elements."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(values: Tensor) -> Tensor:
    """The bit patterns of a tensor as integers of its width, flat."""
    return values.detach().reshape(-1).view(_BITS[values.element_size()])


@torch.no_grad()
def checksum(values: Tensor, start: int = 0) -> Tensor:
    """Return an int64 scalar on the tensor's device: the sum, modulo 2**64, of every element's bits
    times an odd number that depends on its place. ``start`` is the place of the first element: the
    checksums of consecutive ranges add up to the checksum of the whole, and zeros add nothing."""
    bits = bits_of(values)
    if bits.dtype == torch.int64:  # the factor of a sign would always be the same, 2**63
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
    """Odd numbers of 64 random-looking bits (the last steps of splitmix64), wrapping around."""
    x = (numbers + 1) * -0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, places: int) -> Tensor:
    """To the right, filled with zeros."""
    return (x >> places) & ((1 << (64 - places)) - 1)
