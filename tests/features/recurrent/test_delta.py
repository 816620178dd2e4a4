"""The gated delta rule in chunks against its definition token by token, written here, and against
the functions of transformers; packed documents against each alone.

Shapes: P sequences, T tokens, K key heads, N value heads, D key width, V value width.
"""

import pytest
import torch
from routers import in_float64

from megatron.features.recurrent.costs import _of_delta_rule
from megatron.features.recurrent.delta import gated_delta_rule, one_step
from megatron.features.recurrent.flags import DeltaConfig

K, N, D, V = 2, 4, 8, 6
BORDERS = {"none": (), "some": ((0, 0), (0, 3), (0, 64), (0, 65), (1, 100), (1, 127), (1, 128))}


def tensors(length, dtype=torch.float64, samples=2):
    """Queries, keys, values, logarithms of decays, shares and first states."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (draw(samples, length, h, w) for h, w in ((K, D), (K, D), (N, V)))
    logs, beta = -draw(samples, length, N).abs(), draw(samples, length, N).sigmoid()
    return q, k, v, logs, beta, draw(samples, N, D, V)


def by_token(q, k, v, logs, beta, state, starts=None):
    """S <- exp(g) S + b k (v - exp(g) S^T k)^T and y = S^T q."""
    unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    q, k = (unit(x).repeat_interleave(N // K, 2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        if starts is not None:
            state = state * ~starts[:, t, None, None, None]
        state = state * logs[:, t, :, None, None].exp()
        missing = v[:, t] - torch.einsum("pndv,pnd->pnv", state, k[:, t])
        state = state + torch.einsum("pn,pnd,pnv->pndv", beta[:, t], k[:, t], missing)
        outputs.append(torch.einsum("pndv,pnd->pnv", state, q[:, t] / D**0.5))
    return torch.stack(outputs, 1), state


def starts_of(length, borders):
    starts = torch.zeros(2, length, dtype=torch.bool)
    for place in borders:
        starts[place] = True
    return starts if borders else None


@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("length", [150, pytest.param(128, marks=pytest.mark.proof), 5])
def test_chunks_against_the_definition(length, borders):
    """Outputs, last states, and the gradients of everything."""
    starts = starts_of(length, [each for each in BORDERS[borders] if each[1] < length])
    inputs = [x.requires_grad_() for x in tensors(length)]
    ours = gated_delta_rule(*inputs[:5], starts, inputs[5])
    expected = by_token(*inputs, starts)
    grads = [torch.randn_like(x) for x in expected]
    for actual, wanted in zip(
        (*ours, *torch.autograd.grad(ours, inputs, grads)),
        (*expected, *torch.autograd.grad(expected, inputs, grads)),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [64, pytest.param(16, marks=pytest.mark.proof)])
def test_against_transformers(chunk):
    """Both forms of transformers, forward and backward."""
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = [x.requires_grad_() for x in tensors(100)]
    ours = gated_delta_rule(*inputs[:5], None, inputs[5], chunk)
    grads = [torch.randn_like(x) for x in ours]
    actual = torch.autograd.grad(ours, inputs, grads)
    for function in (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule):
        with in_float64(theirs):
            expected = function(
                *inputs[:5],
                initial_state=inputs[5],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            wanted = torch.autograd.grad(expected, inputs, grads)
        for one, other in zip((*ours, *actual), (*expected, *wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_one_step_continues_chunks():
    *inputs, state = tensors(70)
    whole, last = gated_delta_rule(*inputs, state=state)
    _, state = gated_delta_rule(*(x[:, :64] for x in inputs), state=state)
    for t in range(64, 70):
        y, state = one_step(*(x[:, t] for x in inputs), state)
        torch.testing.assert_close(y, whole[:, t], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_a_packed_document_is_as_if_alone():
    """The chunks of a document in the middle of others begin elsewhere than those of it alone."""
    *inputs, _ = tensors(150)
    starts = starts_of(150, ((0, 40), (1, 40), (0, 130), (1, 130)))
    whole, _ = gated_delta_rule(*inputs, starts)
    alone, _ = gated_delta_rule(*(x[:, 40:130] for x in inputs))
    torch.testing.assert_close(whole[:, 40:130], alone, rtol=0, atol=1e-12)


def test_half_precision_computes_in_float32():
    *inputs, _ = tensors(100, torch.bfloat16)
    y, state = gated_delta_rule(*inputs)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    wide, wide_state = gated_delta_rule(*(x.float() for x in inputs))
    torch.testing.assert_close(y, wide.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(state, wide_state, rtol=0, atol=0)


@pytest.mark.parametrize("keys, values, width, value_width", [(2, 4, 128, 128), (4, 4, 64, 64)])
def test_the_numbers_that_the_backward_pass_needs(keys, values, width, value_width):
    part = DeltaConfig(linear_num_key_heads=keys, linear_num_value_heads=values)
    inputs = (
        torch.randn(1, 256, keys, width),
        torch.randn(1, 256, keys, width),
        torch.randn(1, 256, values, value_width),
        -torch.rand(1, 256, values),
        torch.rand(1, 256, values),
    )
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated_delta_rule(*(x.requires_grad_() for x in inputs))
    ours = {x.untyped_storage().data_ptr() for x in inputs}
    numbers = sum(each.nbytes() for place, each in kept.items() if place not in ours) / 4 / 256
    assert _of_delta_rule(part, values, width, value_width) == pytest.approx(numbers, rel=0.06)
