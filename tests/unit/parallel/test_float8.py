"""8-bit products against products of the rounded values, and against the exact ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.float8 import Float8
from megatron.parallel.layers import linear

TOKENS, INPUTS, OUTPUTS = 32, 64, 48
KINDS = {
    f"{'hybrid' if hybrid else 'e4m3'}-{recipe}": Float8(hybrid, recipe)
    for hybrid in (False, True)
    for recipe in ("tensorwise", "rowwise")
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Bfloat16 values whose sizes differ between rows and between columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    sizes = torch.rand(shape[0], 1, generator=generator), torch.rand(shape[1], generator=generator)
    return (x * (0.2 + sizes[0]) * (0.2 + sizes[1])).bfloat16()


def rounded(x: Tensor, dtype: torch.dtype, dims: int | None) -> Tensor:
    """What is left of values after 8 bits, float64. They are scaled in float32: many lie half-way
    between two 8-bit numbers."""
    largest = x.float().abs().max() if dims is None else x.float().abs().amax(dims, keepdim=True)
    factor = LARGEST[dtype] / largest
    return (x.float() * factor).to(dtype).double() / factor.double()


def product(left: Tensor, right: Tensor, float8: Float8, of_gradient: bool) -> Tensor:
    first = torch.float8_e5m2 if of_gradient and float8.hybrid else torch.float8_e4m3fn
    dims = (1, 0) if float8.recipe == "rowwise" else (None, None)
    return rounded(left, first, dims[0]) @ rounded(right, torch.float8_e4m3fn, dims[1])


def output(float8: Float8, x: Tensor, weight: Tensor) -> Tensor:
    return float8.output(float8.cast_input(x, None), float8.cast_weight(weight), x.dtype)


def input_gradient(float8: Float8, grad: Tensor, weight: Tensor) -> Tensor:
    casts = float8.cast_gradient(grad, None), float8.cast_weight(weight)
    return float8.input_gradient(*casts, grad.dtype)


def weight_gradient(float8: Float8, grad: Tensor, x: Tensor) -> Tensor:
    casts = float8.cast_gradient(grad, None), float8.cast_input(x, None)
    return float8.weight_gradient(*casts, grad.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_products_against_rounded_values(kind):
    """Every product, to the rounding of its result to bfloat16."""
    float8 = KINDS[kind]
    x, weight, grad = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS, seed=1), draw(TOKENS, OUTPUTS)
    for found, expected in (
        (output(float8, x, weight), product(x, weight.t(), float8, False)),
        (input_gradient(float8, grad, weight), product(grad, weight, float8, True)),
        (weight_gradient(float8, grad, x), product(grad.t(), x, float8, True)),
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(
            found.double(), expected, rtol=2**-8, atol=float(expected.abs().max()) * 2e-3
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_against_exact_products(kind, bias):
    """Mean errors: three bits of mantissa round by 2.6 % (rms), both factors by 3.7 %; two bits by
    twice as much."""
    float8 = KINDS[kind]
    x = draw(TOKENS, INPUTS).view(2, -1, INPUTS).requires_grad_()
    params = [draw(OUTPUTS, INPUTS, seed=1).requires_grad_()]
    params += [draw(1, OUTPUTS, seed=2)[0].requires_grad_()] if bias else []
    inputs = [x, *params]
    found = linear(x, params[0], params[1] if bias else None, float8)
    assert found.shape == (2, TOKENS // 2, OUTPUTS)
    grad = draw(TOKENS, OUTPUTS, seed=3).view_as(found)
    exact = F.linear(*(each.double() for each in inputs))
    pairs = zip(
        [found, *torch.autograd.grad(found, inputs, grad)],
        [exact, *torch.autograd.grad(exact, inputs, grad.double())],
        [0.04, *([0.07] * 2 if float8.hybrid else [0.04] * 2), 0.005],
        strict=False,
    )
    for ours, theirs, limit in pairs:
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        assert error <= limit
        assert limit == 0.005 or error > limit / 4, "8 bits must round"


def test_an_outlier_spoils_its_row_only_with_scales_by_row():
    x, weight = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS, seed=1)
    x[0, 0] = 1e6
    exact = x[1:].double() @ weight.t().double()
    errors = [
        float((output(Float8(True, recipe), x, weight)[1:] - exact).norm() / exact.norm())
        for recipe in ("tensorwise", "rowwise")
    ]
    assert errors[1] < 0.04 < 0.5 < errors[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_overflows_are_seen(value, recipe):
    """A loss scaler, and the check of the loss, need them."""
    x, weight = draw(TOKENS, INPUTS), draw(OUTPUTS, INPUTS, seed=1)
    x[3, 5] = value
    assert output(Float8(True, recipe), x, weight)[3].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind):
    zeros = torch.zeros(TOKENS, INPUTS)
    assert not output(KINDS[kind], zeros, draw(OUTPUTS, INPUTS).float()).any()


def test_under_autocast_products_are_bfloat16_and_gradients_float32():
    x = draw(TOKENS, INPUTS).float().requires_grad_()
    weight = draw(OUTPUTS, INPUTS, seed=1).float().requires_grad_()
    bias = torch.ones(OUTPUTS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x, weight, bias, Float8())
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    halves = [each.detach().bfloat16() for each in (x, weight, bias)]
    assert torch.equal(found, linear(*halves, Float8()))


def test_tokens_that_16_does_not_divide():
    """They are refused where weights are trained; generation takes one token at a time."""
    x, weight = draw(17, INPUTS), draw(OUTPUTS, INPUTS, seed=1).requires_grad_()
    with pytest.raises(ValueError, match="17 tokens of a micro batch are not a multiple of 16"):
        linear(x, weight, None, Float8())
    with torch.no_grad():
        assert linear(x[:1], weight, None, Float8()).shape == (1, OUTPUTS)
