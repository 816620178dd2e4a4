"""The cache returns what went in, in order, at any capacity."""

import pytest
import torch

from megatron.inference.generate import KeyValueCache


@pytest.mark.parametrize("capacity", [1, 5, 64])
def test_against_concatenation(capacity):
    generator = torch.Generator().manual_seed(0)
    cache = KeyValueCache(capacity)
    seen = {layer: ([], []) for layer in range(3)}
    for width in (4, 1, 1, 7, 1, 13):
        for layer, (keys, values) in seen.items():
            keys.append(torch.randn(2, 3, width, 5, generator=generator))
            values.append(torch.randn(2, 3, width, 5, generator=generator))
            k, v = cache.extend(layer, keys[-1], values[-1])
            assert torch.equal(k, torch.cat(keys, 2))
            assert torch.equal(v, torch.cat(values, 2))
    assert cache.length == 27


def test_grows_by_doubling():
    cache = KeyValueCache(4)
    x = torch.zeros(1, 1, 1, 2)
    rooms = set()
    for _ in range(100):
        k, _ = cache.extend(0, x, x)
        rooms.add(k.untyped_storage().nbytes() // 8)
    assert rooms == {4, 8, 16, 32, 64, 128}


def test_dtype_is_kept():
    x = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    assert KeyValueCache(4).extend(0, x, x)[0].dtype == torch.bfloat16


def test_empty():
    assert KeyValueCache(4).length == 0
