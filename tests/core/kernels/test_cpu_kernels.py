"""Attention by blocks of queries, against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import cpu_kernels
from megatron.kernels.cpu_kernels import attention, suits
from megatron.model import attention_backends
from megatron.model.attention_backends import sdpa
from megatron.model.attention_masks import AttentionMasks, AttentionScoring

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
    return attention(q, k, v, 0.3)


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


BIASES = [None, (2, 1, 1, 30), (1, 4, 20, 30), (2, 4, 20, 30), (1, 1, 20, 1)]


@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("block", [8, 256])
def test_all_keys_and_a_bias_against_torch(monkeypatch, block, kv_heads, shape):
    """The gradient of the bias too, and of other numbers of keys than of queries."""
    monkeypatch.setattr(cpu_kernels, "WHOLE_BLOCK", block)
    q, _, _, grad = case(4, kv_heads, 20)
    _, k, v, _ = case(4, kv_heads, 30)
    draw = torch.Generator().manual_seed(1)
    bias = None if shape is None else torch.randn(shape, generator=draw, dtype=torch.float64)

    def found(attend, dtype):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        addend = None if bias is None else bias.to(dtype, copy=True).requires_grad_()
        y = attend(*inputs, addend)
        wanted = inputs if addend is None else [*inputs, addend]
        return [y.detach(), *torch.autograd.grad(y, wanted, grad.to(dtype))]

    def ours(q, k, v, bias):
        return attention(q, k, v, 0.3, causal=False, bias=bias)

    def torchs(q, k, v, bias):
        k, v = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * 0.3
        return (scores if bias is None else scores + bias).softmax(-1) @ v

    expected = found(torchs, torch.float64)
    largest = max(x.abs().max() for x in expected)
    for mine, wanted in zip(found(ours, torch.float32), expected, strict=True):
        assert mine.shape == wanted.shape
        assert (mine - wanted).abs().max() <= 1e-6 * largest


def test_padding_takes_it_in_bfloat16_and_changes_nothing(monkeypatch):
    """The kernel is chosen for padded samples, and padding leaves the others' output alone."""
    q, k, v, grad = case(4, 2, 30, torch.bfloat16)
    padding = torch.zeros(BATCH, 30, dtype=torch.bool)
    padding[1, 21:] = True
    masks, scores = AttentionMasks(padding_BT=padding), AttentionScoring(causal=False)
    monkeypatch.setattr(attention_backends.F, "scaled_dot_product_attention", None)
    found = results(lambda *x: sdpa(*x, scores, masks, 0.0), q, k, v, grad)
    for sample, end in ((0, 30), (1, 21)):
        some = [x[sample : sample + 1, :, :end].detach() for x in (q, k, v)]
        alone = sdpa(*some, scores, AttentionMasks(), 0.0)
        assert (found[0][sample, :, :end] - alone[0]).abs().max() < 2e-2
    assert not found[2][1, :, 21:].any() and not found[3][1, :, 21:].any()


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
    q, k, *_ = case(4, 2, 8 * WIDTH, torch.bfloat16)
    assert suits(q, k, causal=False) and suits(q[:, :, 1:], k, causal=False)
    longer = case(4, 2, 8 * WIDTH + 1, torch.bfloat16)
    assert not suits(*longer[:2], causal=False)
