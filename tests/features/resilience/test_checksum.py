"""The checksum of a tensor's bits."""

import itertools

import pytest
import torch

from megatron.features.resilience.steps.checksum import bits_of, checksum

NUMEL = 40_003
"""Two whole blocks and a part of a third."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


def drawn(dtype):
    torch.manual_seed(1)
    values = torch.randn(NUMEL)
    return (values * 40).abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_changed_bit_shows(dtype):
    values = drawn(dtype)
    bits, width = bits_of(values), 8 * values.element_size()
    before = int(checksum(values))
    seen = {before}
    for place, bit in itertools.product(
        (0, 1, 2**14 - 1, 2**14, 2**15 + 7, NUMEL - 1), range(width)
    ):
        last = bit == width - 1 and dtype != torch.uint8
        bits[place] ^= -(1 << bit) if last else 1 << bit
        seen.add(int(checksum(values)))
        bits[place] ^= -(1 << bit) if last else 1 << bit
    assert len(seen) == 1 + 6 * width  # each is another one, so that no two of them cancel
    assert int(checksum(values)) == before


def test_elements_that_change_places_show():
    values = drawn(torch.float32)
    swapped = values.clone()
    swapped[[3, 20_000]] = values[[20_000, 3]]
    assert int(checksum(values)) != int(checksum(swapped))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", [[1], [2**14], [5, 2**14 + 1, 2**15], [NUMEL - 1]], ids=str)
def test_those_of_parts_add_up(dtype, cuts):
    values, edges = drawn(dtype), [0, *cuts, NUMEL]
    parts = [checksum(values[a:b], a) for a, b in itertools.pairwise(edges)]
    assert int(torch.stack(parts).sum()) == int(checksum(values))


def test_zeros_at_the_end_add_nothing():
    values = drawn(torch.float32)
    padded = torch.cat([values, torch.zeros(30_000)])
    assert int(checksum(padded)) == int(checksum(values)) != int(checksum(values, 1))
    assert int(checksum(values[:0])) == 0
