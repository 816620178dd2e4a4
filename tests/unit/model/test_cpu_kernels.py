"""Attention by blocks of queries, against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model import cpu_kernels
from megatron.model.cpu_kernels import causal_attention, suits

BATCH, WIDTH = 2, 16


def case(heads, kv_heads, length, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)

    def made(count):
        x = torch.randn(BATCH, length, count, WIDTH, generator=draw, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2)  # as views of a product

    return made(heads), made(kv_heads), made(kv_heads), made(heads)


def results(attend, q, k, v, grad):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    y = attend(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


def ours(q, k, v):
    return causal_attention(q, k, v, 0.3)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("block", [8, 128])
def test_against_torch(monkeypatch, block, length, heads, kv_heads):
    """In float32, in which torch's own sums differ by as much."""
    monkeypatch.setattr(cpu_kernels, "BLOCK", block)
    exact = case(heads, kv_heads, length)
    single = [x.float() for x in exact]
    expected = results(torchs, *exact)
    largest = max(x.abs().max() for x in expected)
    for found, wanted in zip(results(ours, *single), expected, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= 1e-6 * largest


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bfloat16_is_as_close_as_torchs_kernel(monkeypatch, kv_heads):
    monkeypatch.setattr(cpu_kernels, "BLOCK", 32)
    half = case(4, kv_heads, 100, torch.bfloat16)
    exact = results(torchs, *(x.double() for x in half))
    for found, theirs, expected in zip(
        results(ours, *half), results(torchs, *half), exact, strict=True
    ):
        error, allowed = ((x - expected).norm() / expected.norm() for x in (found, theirs))
        assert error <= 1.3 * allowed + 1e-4, (error, allowed)


def test_output_lies_as_the_projection_takes_it():
    y = ours(*case(4, 2, 9, torch.bfloat16)[:3])
    assert y.transpose(1, 2).is_contiguous()


def test_what_it_suits():
    q, k, v, _ = case(4, 2, 16 * WIDTH, torch.bfloat16)
    assert suits(q, k)
    assert not suits(q[:, :, 1:], k), "a cache"
    assert not suits(q.float(), k.float())
    longer = case(4, 2, 16 * WIDTH + 1, torch.bfloat16)
    assert not suits(*longer[:2])
