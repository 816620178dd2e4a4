"""Operators with Triton kernels on a GPU: against their formulas, and their time against what
torch's compiler makes of the same formulas."""

import pytest
import torch
from gpu_runs import DEVICE, needs_gpu

from megatron.kernels import rope, swiglu
from megatron.kernels.rope import PackedHeads, rotated
from megatron.kernels.switches import uses
from megatron.model.activations import activation_of
from megatron.model.rope import apply_rope

DTYPES = torch.bfloat16, torch.float16, torch.float32
pytestmark = needs_gpu


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same but for the last bit: kernels contract products and sums, and have their own
    exponential, whose results fall now and again on the other side of a rounding."""
    eps = torch.finfo(ours.dtype).eps
    scale = theirs.float().abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=4e-6 * scale)
    if ours.dtype != torch.float32:
        assert (ours != theirs).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1037, 8960, 8])
@pytest.mark.parametrize("kind", swiglu.GATES)
@pytest.mark.parametrize("clamp, offset", [(None, 0.0), (1.5, 1.0)])
def test_gates(kind, clamp, offset, columns, dtype):
    torch.manual_seed(0)
    x = torch.randn(65, 2 * columns, device=DEVICE).to(dtype)
    grad = torch.randn(65, columns, device=DEVICE).to(dtype)
    assert uses("swiglu", x)
    args = kind, clamp, offset, True
    y, most = swiglu.swiglu(x, *args)
    near(y, swiglu._formula(x, *args)[0])
    assert most.item() == y.abs().max().item()
    dx, most = swiglu.swiglu_backward(x, grad, *args)
    near(dx, swiglu._backward_formula(x, grad, *args)[0])
    assert most.item() == dx.abs().max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "queries, keys, width, turned", [(12, 2, 128, 128), (16, 2, 128, 64), (5, 1, 80, 80)]
)
def test_rotations(queries, keys, width, turned, gated, interleaved, dtype):
    torch.manual_seed(0)
    heads = PackedHeads(queries, keys, width, gated, interleaved)
    units = queries * (1 + gated) + 2 * keys
    packed = torch.randn(2, 67, units * width, device=DEVICE).to(dtype)
    angles = 6 * torch.rand(67, 1, turned // 2, device=DEVICE)
    both = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    cos, sin = both.cos(), both.sin()
    theirs = packed.clone()
    rope._formula(theirs, cos, sin, *heads)
    results = rotated(packed, cos, sin, heads)
    for ours, expected in zip(results, heads.views(theirs), strict=True):
        if ours is not None and expected is not None:
            near(ours, expected)
    grads = [
        torch.randn(2, count, 67, width, device=DEVICE).to(dtype).transpose(1, 2)
        for count in (queries, keys, keys, queries)[: 3 + gated]
    ]
    args = (*grads, *[None] * (1 - gated), cos, sin, interleaved, True)
    ours, most = rope.rope_backward(*args)
    near(ours, rope._backward_formula(*args)[0])
    assert most.item() == ours.abs().max().item()


def test_float64_is_computed_by_the_formula():
    x = torch.randn(3, 10, device=DEVICE, dtype=torch.float64)
    assert not uses("swiglu", x)
    y, _ = swiglu.swiglu(x, "swiglu", None, 0.0, False)
    assert torch.equal(y, swiglu._formula(x, "swiglu", None, 0.0, False)[0])


def milliseconds(run, rounds: int = 20) -> float:
    """The median of GPU time."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[rounds // 2]


@pytest.mark.parametrize("inner", [8960, 11_008, 18_944])
def test_gates_are_faster_than_compiled_code(inner, record_property):
    """Of Qwen2.5's widths at 8,192 tokens; the backward pass of today's code computes both halves
    for each element."""
    from megatron.config.blocks import MLPConfig
    from megatron.kernels.switches import switched

    mlp = MLPConfig(ffn_hidden_size=1, activation="swiglu", bias=False)
    x = torch.randn(8192, 2 * inner, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(8192, inner, device=DEVICE, dtype=torch.bfloat16)
    times = {}
    for operator in (True, False):
        torch._dynamo.reset()
        with switched(swiglu=operator):
            step = torch.compile(activation_of(mlp), dynamic=False)
            y = step(x)
            times[operator] = milliseconds(
                lambda y=y: torch.autograd.grad(y, x, grad, retain_graph=True)
            )
    record_property("milliseconds", times)
    print(f"swiglu backward, inner {inner}: {times}")
    assert times[True] < times[False]


@pytest.mark.parametrize("queries, keys", [(12, 2), (16, 2), (28, 4)])
def test_rotations_are_faster_than_compiled_code(queries, keys, record_property):
    heads = PackedHeads(queries, keys, 128)
    width = (queries + 2 * keys) * 128
    packed = torch.randn(8, 1024, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = torch.randn(2, 1024, 1, 128, device=DEVICE)
    grads = [
        torch.randn(8, count, 1024, 128, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        for count in (queries, keys, keys)
    ]

    def by_operator(packed):
        return rotated(packed * 1, cos, sin, heads)[:3]

    def today(packed):
        q, k, v, _ = heads.views(packed * 1)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    times = {}
    for function in (by_operator, today):
        torch._dynamo.reset()
        outputs = torch.compile(function, dynamic=False)(packed)
        times[function.__name__] = milliseconds(
            lambda outputs=outputs: torch.autograd.grad(outputs, packed, grads, retain_graph=True)
        )
    record_property("milliseconds", times)
    print(f"rope backward, {queries} heads: {times}")
    assert times["by_operator"] < times["today"]
