"""Runs the Triton kernels on CPU tensors, by Triton's interpreter, against their formulas.

    TRITON_INTERPRET=1 python tests/core/kernels/interpreted.py [NAME ...]

A program of its own, since the interpreter is chosen when triton is imported. It prints a line for
each check that fails. The interpreter rounds to bfloat16 by cutting bits off, which a GPU does not:
results in bfloat16 are compared with float32's, cut off.
"""

import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.kernels import rope, rope_triton, swiglu, swiglu_triton
from megatron.kernels.rope import PackedHeads

DTYPES = torch.float32, torch.float16, torch.bfloat16
FAILED: list[str] = []


def expect(right: bool, name: str) -> None:
    if not right:
        print(f"FAILED {name}")
        FAILED.append(name)


def same(ours: Tensor, theirs: Tensor, name: str) -> None:
    """The same bits, zeros of both signs apart."""
    equal = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    equal = equal and torch.equal(ours.isnan(), theirs.isnan())
    expect(equal and torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), name)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """From float32 as the interpreter does."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def near(ours: Tensor, exact: Tensor, size: Tensor, name: str) -> None:
    """Within 32 units in the last place of float32 of numbers as large as ``size``: results are
    three to six operations away from the arguments, and the exponential of large ones is less
    accurate in proportion."""
    error = ((ours.double() - exact).abs() / (size + 1e-30)).max().item()
    expect(error <= 32 * torch.finfo(torch.float32).eps, f"{name}: {error:.1e}")


def check_swiglu() -> None:
    """Values against float64, 16 bits against float32, magnitudes exactly; at widths that do not
    divide into programs, where the next row is 1000 times larger."""
    options = (None, 0.0), (1.5, 1.0)
    for kind, (clamp, offset), columns in itertools.product(
        swiglu.GATES, options, (1037, 1024, 8, 3)
    ):
        if columns != 1037 and (kind != "swiglu" or clamp is not None):
            continue
        torch.manual_seed(columns)
        x = torch.randn(3, 2 * columns) * 2
        grad = torch.randn(3, columns)
        x[1], grad[1] = x[1].clamp(-4, 4), grad[1] * 1000
        for dtype in DTYPES:
            name = f"{kind} clamp {clamp} columns {columns} {dtype}"
            args = x.to(dtype), kind, clamp, offset, True
            grads = x.to(dtype), grad.to(dtype), kind, clamp, offset, True
            y, most = swiglu_triton.forward(*args)
            dx, dmost = swiglu_triton.backward(*grads)
            expect(most.item() == y.abs().max().item(), f"{name}: magnitude")
            expect(dmost.item() == dx.abs().max().item(), f"{name}: magnitude of the gradient")
            if dtype == torch.float32:
                gate, up = x.double().chunk(2, -1)
                size = (1 + gate.abs()) * (1 + up.abs())
                near(y, swiglu.swiglu(x.double(), *args[1:])[0], size, name)
                steep = (1 + gate.abs()).pow(3) * (1 + up.abs()) * grad.abs()
                exact, _ = swiglu.swiglu_backward(x.double(), grad.double(), *grads[2:])
                near(dx, exact, torch.cat([steep, steep], -1), f"{name} backward")
                continue
            wide, _ = swiglu_triton.forward(args[0].float(), *args[1:])
            same(y, rounded(wide, dtype), name)
            wide, _ = swiglu_triton.backward(grads[0].float(), grads[1].float(), *grads[2:])
            same(dx, rounded(wide, dtype), f"{name} backward")


def check_magnitudes() -> None:
    """Magnitudes of negative numbers, one row alone, not-a-number, and none at all."""
    for row, sign in itertools.product(range(4), (1.0, -1.0)):
        x = torch.full((4, 2 * 1500), 0.5)
        x[row, 1500 + 1100] = 1e4 * sign
        y, most = swiglu_triton.forward(x, "squared_reglu", None, 0.0, True)
        expect(most.item() == y.abs().max().item() == 2500, f"magnitude of row {row}, {sign}")
    x[2, 1] = torch.nan
    _, most = swiglu_triton.forward(x, "swiglu", None, 0.0, True)
    expect(bool(most.isnan()), "magnitude of not-a-number")
    y, most = swiglu_triton.forward(torch.zeros(0, 8), "swiglu", None, 0.0, True)
    expect(y.shape == (0, 4) and most.item() == 0, "magnitude of nothing")


def check_far_rows() -> None:
    """Rows after the 2^31-th element are addressed; the pages between are never touched."""
    apart = 2**30 + 16  # of 32 bits itself, so that a product by rows of 32 bits overflows
    storage = torch.empty(2 * apart + 64, dtype=torch.float16)
    x = storage.as_strided((3, 32), (apart, 1))
    x.copy_(torch.randn(3, 32))
    y, _ = swiglu_triton.forward(x, "squared_reglu", None, 0.0, False)
    same(y, swiglu.swiglu(x, "squared_reglu", None, 0.0, False)[0], "rows far apart")


def check_rope() -> None:
    """Bit for bit, as rotations are two products and a sum: layouts of heads, angles of samples,
    gradients in the layouts of attention kernels, largest magnitudes."""
    samples, length = 2, 13
    shapes = ((6, 2, 16, 16), (3, 3, 72, 24), (14, 2, 128, 128), (2, 1, 80, 80))
    for (queries, keys, width, turned), gated, interleaved, dtype in itertools.product(
        shapes, (False, True), (False, True), DTYPES
    ):
        if width >= 80 and (gated or dtype != torch.bfloat16):
            continue
        torch.manual_seed(width)
        heads = PackedHeads(queries, keys, width, gated, interleaved)
        units = queries * (1 + gated) + 2 * keys
        packed = torch.randn(samples, length, units * width).to(dtype)
        for shape in ((length, 1), (samples, length, 1), (1, length, 1)):
            name = f"rope {heads} {turned} {dtype} {shape}"
            angles = 6 * torch.rand(*shape, turned // 2)
            both = (
                angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
            )
            # Numbers that each dtype has: the interpreter would round others in its own way.
            cos, sin = (table.to(dtype).float() for table in (both.cos(), both.sin()))
            wide = packed.to(torch.float32, copy=True)
            rope._formula(wide, cos, sin, *heads)
            ours = packed.clone()
            rope._kernel(ours, cos, sin, *heads)
            same(ours, rounded(wide, dtype), name)
            grads = [
                torch.randn(samples, count, length, width).to(dtype).transpose(1, 2)
                for count in (queries, keys, keys, queries)[: 3 + gated]
            ]
            grads[1] = grads[1].contiguous()
            args = (*grads, *[None] * (1 - gated))
            wide_args = (None if x is None else x.float() for x in args)
            ours, most = rope._backward_kernel(*args, cos, sin, interleaved, True)
            theirs, _ = rope._backward_formula(*wide_args, cos, sin, interleaved, False)
            same(ours, rounded(theirs, dtype), f"{name} backward")
            expect(most.item() == ours.abs().max().item(), f"{name}: magnitude")
            rope._backward_kernel(*args, cos, sin, interleaved, False)


def check_odd_places() -> None:
    """Gradients whose pairs of channels are not words in memory, and whose channels are apart."""
    cos = sin = torch.full((3, 1, 4), 0.5)
    q = torch.randn(1, 3, 2, 5).half()[..., 1:]
    k = torch.randn(1, 3, 4, 1).half().transpose(2, 3)
    ours, _ = rope._backward_kernel(q, k, k, None, cos, sin, True, False)
    theirs, _ = rope._backward_formula(q, k, k, None, cos, sin, True, False)
    same(ours, theirs, "odd places")
    rope_triton.launch(
        q[:0], k[:0], None, None, ours[:0], cos, sin, False, ours.new_empty(0)
    )  # no sample


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or CHECKS:
        CHECKS[chosen]()
        print(f"{chosen}: done")
    sys.exit(bool(FAILED))
