"""Mamba-2's scan against its recurrence (Dao and Gu 2024, equation 11), which is written here token
by token, and against transformers."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from transformers.models.bamba import modeling_bamba

from megatron.features.recurrent.mamba_layer import GatedNorm
from megatron.features.recurrent.scan import reached, scan, step
from megatron.parallel.tensor_parallel import TensorParallel

B, S, N, P, G, D = 2, 23, 6, 4, 3, 5


def inputs(dtype=torch.float64, documents=False, state=False):
    """Arguments of the scan."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=dtype)

    values = [
        normal(B, S, N, P), F.softplus(normal(B, S, N)), -torch.exp(normal(N)),
        normal(B, S, G, D), normal(B, S, G, D), normal(N),
    ]  # fmt: skip
    starts = torch.rand(B, S, generator=draw) < 0.2
    ids = starts.cumsum(1) if documents else None
    return values, ids, normal(B, G, D, N // G, P) if state else None


def recurrence(x, dt, decay, b, c, skip, documents, state):
    h = x.new_zeros(B, N, D, P)
    if state is not None:
        h = state.transpose(2, 3).reshape(B, N, D, P)
    outputs = []
    for t in range(x.shape[1]):
        if documents is not None and t:
            h = h * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        written, read = (each[:, t].repeat_interleave(N // G, 1) for each in (b, c))
        h = torch.exp(decay * dt[:, t])[..., None, None] * h
        h = h + dt[:, t, :, None, None] * written[..., None] * x[:, t, :, None]
        outputs.append(torch.einsum("bnd,bndp->bnp", read, h) + skip[:, None] * x[:, t])
    return torch.stack(outputs, 1), h.unflatten(1, (G, -1)).transpose(2, 3)


@pytest.mark.parametrize(("documents", "state"), [*product([False, True], repeat=2)])
def test_chunks_equal_the_recurrence(documents, state):
    """Outputs, last states, and every gradient of both, by chunks that divide the length or not."""
    values, ids, start = inputs(documents=documents, state=state)
    leaves = [each.requires_grad_() for each in (*values, *([start] if state else []))]
    expected = recurrence(*values, ids, start)
    grads = [torch.randn(each.shape, dtype=each.dtype) for each in expected]
    wanted = torch.autograd.grad(expected, leaves, grads)
    for chunk in (1, 4, 23, 64):
        found = scan(*values, ids, start, chunk)
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(each, other, rtol=1e-12, atol=1e-12)
        for each, other in zip(torch.autograd.grad(found, leaves, grads), wanted, strict=True):
            torch.testing.assert_close(each, other, rtol=1e-12, atol=1e-12)


def test_steps_and_pieces_continue_a_state():
    values, _, _ = inputs()
    whole, last = scan(*values)
    x, dt, decay, b, c, skip = values
    first = [each[:, :9] if each.dim() > 1 else each for each in values]
    found, state = scan(*first)
    outputs = [found]
    for t in range(9, S):
        y, state = step(x[:, t], dt[:, t], decay, b[:, t], c[:, t], skip, state)
        outputs.append(y[:, None])
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


def test_outputs_that_come_from_a_state_before():
    values, ids, state = inputs(documents=True, state=True)
    x, dt, decay, b, c, skip = values
    whole, _ = scan(*values, ids, state)
    rest, _ = scan(*values, ids)
    from_state = reached(dt, decay, c, state, ids == ids[:, :1])
    torch.testing.assert_close(rest + from_state, whole, rtol=1e-12, atol=1e-12)
    assert from_state.abs().max() > 0.1


def test_against_transformers():
    """Its scan is in float32 whatever the inputs."""
    (x, dt, decay, b, c, skip), _, _ = inputs(torch.float32)
    expected, state = modeling_bamba.mamba2_chunk_scan(
        x, dt, decay, b, c, 8, D=skip, return_final_states=True
    )
    found, last = scan(x, dt, decay, b, c, skip)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours = last.transpose(2, 3).flatten(1, 2).mT
    torch.testing.assert_close(ours, state, rtol=1e-5, atol=1e-5)


def test_16_bits_have_states_in_float32():
    values, ids, _ = inputs(torch.float32, documents=True)
    exact, last = scan(*values, ids)
    x, dt, decay, b, c, skip = values
    rounded = [each.bfloat16() for each in (x, b, c)]
    found, state = scan(rounded[0], dt, decay, *rounded[1:], skip, ids)
    assert (found.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    wanted, expected = scan(*(each.float() for each in (rounded[0], dt, decay, *rounded[1:], skip)),
                            ids)  # fmt: skip
    assert torch.equal(found, wanted.bfloat16()) and torch.equal(state, expected)


@pytest.mark.parametrize(("groups", "first"), [*product([1, 3], [False, True])])
def test_gated_norms(groups, first):
    draw = torch.Generator().manual_seed(2)
    x, gate, grad = torch.randn(3, 2, 5, 12, generator=draw, dtype=torch.float64)
    norm = GatedNorm(12, groups, 1e-5, first, TensorParallel()).double()
    weight = torch.randn(12, generator=draw, dtype=torch.float64)
    norm.weight.data.copy_(weight)
    leaves = [each.requires_grad_() for each in (x, gate)]

    def formula(x, gate, weight):
        x = x if first else x * F.silu(gate)
        grouped = x.unflatten(-1, (groups, -1))
        y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2)
        return y * weight * F.silu(gate) if first else y * weight

    expected, found = formula(*leaves, weight.requires_grad_()), norm(*leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected, (*leaves, weight), grad)
    for each, other in zip(
        torch.autograd.grad(found, (*leaves, norm.weight), grad), wanted, strict=True
    ):
        torch.testing.assert_close(each, other, rtol=1e-12, atol=1e-12)
