"""Attention kernels against the definition, one query at a time."""

import math

import pytest
import torch

from megatron.model.attention_backends import (
    attention_backend,
    causal_mask,
    document_mask,
    eager,
    sdpa,
)

HEADS, WIDTH = 4, 8


def tensors(queries, keys, kv_heads):
    draw = torch.Generator().manual_seed(0)

    def random(heads, length):
        values = torch.randn(2, heads, length, WIDTH, generator=draw, dtype=torch.float64)
        return values.requires_grad_()

    return random(HEADS, queries), random(kv_heads, keys), random(kv_heads, keys)


def definition(q, k, v, mask):
    """One query, head and sample at a time."""
    out = torch.empty_like(q)
    offset = k.shape[2] - q.shape[2]
    for b, n, s in torch.cartesian_prod(*(torch.arange(d) for d in q.shape[:3])).tolist():
        head = n // (q.shape[1] // k.shape[1])
        seen = [
            t for t in range(k.shape[2]) if t <= s + offset and (mask is None or mask[b, 0, s, t])
        ]
        scores = k[b, head, seen] @ q[b, n, s] / math.sqrt(WIDTH)
        out[b, n, s] = scores.softmax(0) @ v[b, head, seen]
    return out


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "queries, keys, documents",
    [(6, 6, False), (6, 6, True), (1, 6, False), (3, 6, False), (1, 1, False)],
    ids=["causal", "documents", "one-query", "cache-offset", "single"],
)
@pytest.mark.parametrize("backend", [sdpa, eager])
def test_against_definition(backend, queries, keys, documents, kv_heads):
    mask = document_mask(DOCUMENTS) if documents else None
    inputs, reference = tensors(queries, keys, kv_heads), tensors(queries, keys, kv_heads)
    expected = definition(*(t.detach() for t in reference), mask)
    found = backend(*inputs, mask, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    other = eager if backend is sdpa else sdpa
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    others = torch.autograd.grad((other(*reference, mask, 0.0) * weights).sum(), reference)
    for gradient, expected in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)


def test_gradient_of_the_definition_by_differences():
    inputs = tensors(3, 3, 2)
    assert torch.autograd.gradcheck(lambda q, k, v: eager(q, k, v, None, 0.0), inputs)


@pytest.mark.parametrize("backend", [sdpa, eager])
def test_dropout_acts_and_keeps_the_mean(backend):
    torch.manual_seed(0)
    q, k, v = (t.detach() for t in tensors(6, 6, 4))
    plain = backend(q, k, v, None, 0.0)
    dropped = torch.stack([backend(q, k, v, None, 0.3) for _ in range(200)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - plain).abs().max() < 0.4


def test_causal_mask_puts_the_last_query_at_the_last_key():
    assert causal_mask(2, 4, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_document_mask():
    mask = document_mask(torch.tensor([[0, 0, 1]]))
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_a_kernel_that_is_not_installed_is_refused_by_its_flag():
    with pytest.raises(ValueError, match="--attention-backend flash needs the flash-attn package"):
        attention_backend("flash")
