"""Casts to 8 bits: formulas against their definitions, kernels against the formulas."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted
from samples import sampled
from torch import Tensor

from megatron.features.float8.operators import casts, gated_casts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
DTYPES = pytest.mark.parametrize("dtype", LARGEST)
ODD = (80, 208)
"""A shape that tiles of 64 and of 128 do not divide."""
GATES = {
    "swiglu": F.silu,
    "geglu": functools.partial(F.gelu, approximate="tanh"),
    "geglu_erf": F.gelu,
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_reglu": lambda x: F.relu(x).square(),
}
VALUES = [0.0, torch.inf, -torch.inf, torch.nan]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * torch.rand(shape[0], 1, generator=generator)).bfloat16()


def factors(x: Tensor, dtype: torch.dtype, lines: bool) -> tuple[Tensor, Tensor]:
    if lines:
        rows, columns = (LARGEST[dtype] / x.float().abs().amax(dim) for dim in (1, 0))
        return rows, columns
    factor = LARGEST[dtype] / x.float().abs().amax()
    return factor, factor


CASES = {
    "both": (True, True, False, False),
    "rows": (True, False, False, False),
    "columns": (False, True, False, False),
    "lines": (True, True, True, False),
    "rows of lines": (True, False, True, False),
    "columns of lines": (False, True, True, False),
    "clamped": (True, True, False, True),
}


def arguments(x: Tensor, dtype: torch.dtype, case: str) -> tuple:
    """Arguments of ``cast_both``; where they are clamped a quarter of the numbers is too large."""
    rows, columns, lines, clamp = CASES[case]
    by_rows, by_columns = (factor * (4.0 if clamp else 1.0) for factor in factors(x, dtype, lines))
    by_columns = by_rows if not lines else by_columns
    return x, dtype, by_rows if rows else None, by_columns if columns else None, clamp, clamp


def assert_same(
    ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], differing: float = 0.0
) -> None:
    """Bit for bit, but that infinity, whose scale is zero, and NaN of 8 bits are alike. A share of
    the numbers may be ``differing`` by the last bit of bfloat16, or of 8 bits."""
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype and left.stride() == right.stride()
        if left.dtype in LARGEST:
            left, right = (
                x.float().masked_fill(~x.float().isfinite(), torch.nan) for x in (left, right)
            )
        same = (left == right) | (left.isnan() & right.isnan())
        assert float((~same).float().sum()) <= differing * same.numel()
        rtol = 0.25 if differing else 0.0
        torch.testing.assert_close(left, right, rtol=rtol, atol=0, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_a_cast_rounds_each_number_once(case, dtype):
    """Against the nearest 8-bit number of each product, computed by itself."""
    x = draw(48, 32)
    rows, columns, largest = casts.cast_both(*arguments(x, dtype, case))
    _, _, by_rows, by_columns, clamp, _ = arguments(x, dtype, case)
    limit, numbers = LARGEST[dtype], torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()

    def nearest(factor: Tensor) -> Tensor:
        product = (x.float() * (factor[:, None] if factor.shape == (48,) else factor)).double()
        product = product.clamp(-limit, limit) if clamp else product
        distances = (product.unsqueeze(-1) - numbers.double()).abs()
        return numbers[distances.argmin(-1)], distances.amin(-1), product

    for values, factor in (
        (rows, by_rows),
        (columns.t() if by_columns is not None else columns, by_columns),
    ):
        if factor is None:
            assert values.numel() == 0
            continue
        _, distance, product = nearest(factor)
        torch.testing.assert_close((values.double() - product).abs(), distance, rtol=0, atol=0)
        assert values.float().abs().max() == limit
    assert columns.is_contiguous() and largest.numel() == int(clamp)
    if clamp:
        assert largest == x.float().abs().max()


@DTYPES
@pytest.mark.parametrize("squares", [False, True])
def test_blocks_have_powers_of_two(squares, dtype):
    x = draw(256, 384)
    rows, rows_scale, columns, columns_scale = casts.cast_blocks(x, dtype, squares, True, True)
    for values, scale, source in ((rows, rows_scale, x), (columns, columns_scale, x.t())):
        for top in range(0, source.shape[0], 128):
            for left in range(0, source.shape[1], 128):
                block = source[top : top + 128, left : left + 128].float()
                down, across = top // 128, left // 128
                if squares:
                    of_scale = scale[down, across].expand(128)
                    most = block.abs().max().expand(128)
                else:
                    of_scale = scale[across, top : top + 128]
                    most = block.abs().amax(1)
                powers = torch.tensor(
                    [math.floor(math.log2(LARGEST[dtype] / float(m))) for m in most]
                )
                assert torch.equal(of_scale, 2.0**-powers)
                ours = values[top : top + 128, left : left + 128]
                assert torch.equal(ours.float(), (block * 2.0 ** powers[:, None]).to(dtype).float())
    if squares:
        assert rows_scale.shape == (2, 4) and columns_scale.shape == (3, 4)
        assert not rows_scale[:, 3].any() and not columns_scale[:, 2:].any()
        transposed = casts.padded_squares(rows_scale, 3)
        assert torch.equal(transposed, columns_scale)


def test_operators_agree_with_their_shapes():
    x, grad, factor = draw(128, 256), draw(128, 128, seed=1), torch.tensor(3.0)
    for case in CASES:
        torch.library.opcheck(casts._CAST_BOTH, arguments(x, E4M3, case))
    for squares in (False, True):
        for layouts in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(casts._CAST_BLOCKS, (x, E5M2, squares, *layouts))
    torch.library.opcheck(casts._LARGEST_OF_LINES, (x,))
    torch.library.opcheck(casts._TRANSPOSED, (torch.ones(3, 5, dtype=torch.uint8),))
    for known in (factor, None):
        torch.library.opcheck(gated_casts.activated, (x, "swiglu", E4M3, known, True))
        torch.library.opcheck(
            gated_casts.differentiated, (x, grad, "swiglu", E4M3, factor, E5M2, known)
        )


def test_transposing_keeps_the_bits():
    x = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for values in (x.view(E4M3), x.view(E5M2)):
        ours = casts.transposed(values, draw(1, 1))
        assert ours.dtype == values.dtype and ours.is_contiguous()
        assert torch.equal(ours.view(torch.uint8), x.t())


@pytest.mark.parametrize("kind", sampled(GATES, "swiglu".__eq__))
@pytest.mark.parametrize("known", [True, False])
def test_gated_casts_against_autograd(kind, known):
    """Against float64: the gradient to the rounding of bfloat16 or of 8 bits, its largest
    magnitude, and the activation twice in the same 8 bits."""
    x, grad = draw(32, 96), draw(32, 48, seed=1)
    exact = x.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    y = GATES[kind](gate) * up
    (of_x,) = torch.autograd.grad(y, exact, grad.double())
    forward, backward = torch.tensor(16.0), torch.tensor(2.0**9) if known else None
    rows, largest = gated_casts.activated(x, kind, E4M3, forward, True)
    assert float(largest) == pytest.approx(float(y.abs().max()), rel=2**-8)
    torch.testing.assert_close(rows.double() / 16, y.detach(), rtol=0.07, atol=2**-13)
    ours, columns, largest, activation = gated_casts.differentiated(
        x, grad, kind, E4M3, forward, E5M2, backward
    )
    assert torch.equal(activation.t().float(), rows.float())
    assert float(largest) == pytest.approx(float(of_x.abs().max()), rel=2**-7)
    if backward is None:
        torch.testing.assert_close(ours.double(), of_x, rtol=2**-7, atol=2**-9)
        assert columns.numel() == 0
    else:
        torch.testing.assert_close(ours.double() / 2**9, of_x, rtol=0.14, atol=2**-9)
        assert torch.equal(columns.t().float(), ours.float())


@DTYPES
@pytest.mark.parametrize("value", VALUES)
def test_kernels_of_casts_against_the_formula(dtype, value):
    with interpreted():
        for shape in (ODD, (128, 64)):
            x = draw(*shape)
            x[3, 5] = value
            for case in CASES:
                args = arguments(x, dtype, case)
                assert_same(casts._both_on_gpu(*args), casts.cast_formula(*args))
            assert_same(casts._lines_on_gpu(x), casts._largest_of_lines(x))
            values = x.to(dtype).view(torch.uint8)
            assert torch.equal(casts._transposed_on_gpu(values), values.t())
        x = draw(256, 384)
        x[130, 5] = value
        for squares in (False, True):
            args = (x, dtype, squares, True, True)
            assert_same(casts._blocks_on_gpu(*args), casts._cast_blocks(*args))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("shape", [(80, 48), (64, 64)])
def test_kernels_of_gated_casts_against_the_formula(shape, known):
    """Bit for bit but for a few numbers half-way between two of bfloat16, of which the exponential
    functions of torch and numpy may choose either."""
    tokens, inner = shape
    with interpreted():
        x, grad, factor = draw(tokens, 2 * inner), draw(*shape, seed=1), torch.tensor(60.0)
        for forward in (factor, None):
            args = (x, "swiglu", E4M3, forward, known)
            assert_same(gated_casts._activated_on_gpu(*args), gated_casts._activated(*args), 1e-3)
        args = (x, grad, "swiglu", E4M3, factor, E5M2, factor * 1e4 if known else None)
        ours, theirs = (
            f(*args) for f in (gated_casts._differentiated_on_gpu, gated_casts._differentiated)
        )
        assert_same(ours, theirs, 1e-3)
