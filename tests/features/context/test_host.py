"""Attention in chunks, with and without host memory, against the definition in plain products.

The reference is :func:`~megatron.model.attention_backends.eager` on the whole sequence, in float64.
"""

from dataclasses import replace

import pytest
import torch
from live_bytes import LiveBytes

from megatron.features.context.host import ChunkedAttention, chunk_attention
from megatron.model.attention_backends import eager, sdpa
from megatron.model.attention_masks import AttentionMasks, AttentionScoring

LENGTH = 24
IDS = torch.tensor([[0] * 9 + [1] * 11 + [2] * 4, [0] * 2 + [1] * 20 + [2] * 2])
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [17]])
PLAIN = AttentionScoring(None, None, None, (), True)
CASES = {
    "causal": (PLAIN, AttentionMasks()),
    "scale": (replace(PLAIN, scale=0.3), AttentionMasks()),
    "softcap": (replace(PLAIN, softcap=2.0), AttentionMasks()),
    "window": (replace(PLAIN, window=7), AttentionMasks()),
    "alibi": (replace(PLAIN, slopes=(0.5, 0.25, 0.125, 0.0625)), AttentionMasks()),
    "documents": (PLAIN, AttentionMasks(IDS)),
    "documents-window": (replace(PLAIN, window=5), AttentionMasks(IDS)),
    "full": (replace(PLAIN, causal=False), AttentionMasks(None, PADDING, causal=False)),
}
SAMPLE = ("causal", "window", "documents")


def tensors(batch=2, heads=4, keys=2, length=LENGTH, dtype=torch.float64):
    draw = torch.Generator().manual_seed(3)
    shapes = ((batch, length, heads, 8), *2 * ((batch, length, keys, 8),))
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def computed(attend, scores, masks, inputs, sinks=None, dropout=0.0):
    """The output and all gradients; as in a model, heads and sequence are transposed."""
    q, k, v = (x.transpose(1, 2) for x in inputs)
    y = attend(q, k, v, scores, masks, dropout, None, sinks)
    weight = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    trained = inputs if sinks is None else [*inputs, sinks]
    return [y, *torch.autograd.grad(y, trained, weight)]


def cases():
    for name, (scores, masks) in CASES.items():
        for chunk in (8, 5):
            for sunk in (False, True):
                sampled = name in SAMPLE and (chunk, sunk) in ((8, False), (5, True))
                marks = () if sampled else (pytest.mark.proof,)
                yield pytest.param(
                    scores, masks, chunk, sunk, id=f"{name}-{chunk}-{sunk}", marks=marks
                )


@pytest.mark.parametrize("scores, masks, chunk, sunk", list(cases()))
def test_against_the_definition(scores, masks, chunk, sunk):
    """To 1e-12, and with chunks on the host the same bits."""
    inputs = tensors()
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_() if sunk else None
    expected = computed(eager, scores, masks, inputs, sinks)
    here, on_host = (
        computed(ChunkedAttention(sdpa, chunk, host), scores, masks, inputs, sinks)
        for host in (False, True)
    )
    torch.testing.assert_close(here, expected, rtol=1e-12, atol=1e-12)
    assert all(map(torch.equal, here, on_host))


def test_dropout_is_drawn_again():
    """The chunks drop in the backward pass what they dropped: the derivative along a direction is
    that of finite differences."""
    inputs, attend = tensors(batch=1), ChunkedAttention(sdpa, 8, True)
    masks, step = AttentionMasks(), 1e-6

    def total(moved):
        torch.manual_seed(9)
        q, k, v = (x.transpose(1, 2) for x in moved)
        return attend(q, k, v, PLAIN, masks, 0.4).square().sum()

    directions = [torch.randn_like(x) for x in inputs]
    grads = torch.autograd.grad(total(inputs), inputs)
    slope = sum((g * d).sum() for g, d in zip(grads, directions, strict=True))
    ends = [
        total([x + sign * step * d for x, d in zip(inputs, directions, strict=True)])
        for sign in (1, -1)
    ]
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-6, atol=0)


def test_short_sequences_are_one_chunk():
    inputs = tensors()
    expected = computed(sdpa, PLAIN, AttentionMasks(), inputs)
    for chunk in (LENGTH, 2 * LENGTH):
        got = computed(ChunkedAttention(sdpa, chunk, True), PLAIN, AttentionMasks(), inputs)
        assert all(map(torch.equal, got, expected))


def test_what_is_kept_is_on_the_host():
    """Between the passes only the logarithms of sums are on the device; the backward pass has
    chunks of outputs and queries in float32, not sequences."""
    inputs = tensors(1, 4, 2, 512, torch.float32)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    sizes = {}
    for host in (False, True):
        with LiveBytes() as live:
            y = ChunkedAttention(sdpa, 32, host)(q, k, v, PLAIN, AttentionMasks(), 0.0)
            saved = y.grad_fn.saved_tensors
            sizes[host] = live.bytes(without=(y, *saved[:4]))
    sums = 512 * 4 * 4
    assert sizes[False] == sizes[True] == sums
    q_BSND = saved[0].permute(2, 0, 1, 3)
    assert q_BSND.is_contiguous(), "a chunk of tokens is one piece of host memory"


def test_keys_that_no_query_sees_stay_on_the_host(monkeypatch):
    """A window of one chunk needs two chunks of keys for each chunk of queries."""
    from megatron.features.context import host

    counts = []
    start = host._start
    monkeypatch.setattr(host, "_start", lambda *args: counts.append(1) or start(*args))
    inputs = tensors(length=64)
    computed(ChunkedAttention(sdpa, 8, True), replace(PLAIN, window=8), AttentionMasks(), inputs)
    assert len(counts) == 8 + (1 + 7 * 2)


def test_every_attention_of_a_block():
    class Part(torch.nn.Module):
        attend = staticmethod(sdpa)

    block = torch.nn.Module()
    block.attention, block.cross_attention, block.mlp = Part(), Part(), Part()
    chunk_attention([block], 16, True)
    assert block.attention.attend.chunk == block.cross_attention.attend.chunk == 16
    assert block.attention.attend.attend is block.mlp.attend is sdpa
