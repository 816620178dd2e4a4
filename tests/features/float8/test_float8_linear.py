"""8-bit products against products of the rounded values, and against the exact ones."""

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from lowering import compiled_traffic
from samples import sampled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.features.float8.casts import cast
from megatron.features.float8.linear import NOTHING_KEPT, Float8, Kept
from megatron.kernels.compiler import missing_compiler
from megatron.parallel.linear import linear

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
    rows = float8.weight_rows(weight, NOTHING_KEPT)
    return float8.output(float8.cast_input(x, None), rows, x.dtype)


def input_gradient(float8: Float8, grad: Tensor, weight: Tensor) -> Tensor:
    casts = float8.cast_gradient(grad, None), float8.weight_columns(weight, NOTHING_KEPT)
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


def rounded_by_blocks(x: Tensor, dtype: torch.dtype, down: int, across: int) -> Tensor:
    """The same with a power of two for each block of a matrix, float64."""
    found = torch.empty(x.shape, dtype=torch.float64)
    for top in range(0, len(x), down):
        for left in range(0, x.shape[1], across):
            here = slice(top, top + down), slice(left, left + across)
            factor = 2.0 ** math.floor(math.log2(LARGEST[dtype] / float(x[here].abs().max())))
            found[here] = (x[here].float() * factor).to(dtype).double() / factor
    return found


@pytest.mark.parametrize("hybrid", [False, True])
def test_products_by_blocks_against_rounded_values(hybrid):
    float8, forward = Float8(hybrid, "blockwise"), torch.float8_e4m3fn
    backward = torch.float8_e5m2 if hybrid else forward
    x, weight, grad = draw(256, 128), draw(384, 128, seed=1), draw(256, 384, seed=2)
    squares = rounded_by_blocks(weight, forward, 128, 128)
    pairs = (
        (output(float8, x, weight), rounded_by_blocks(x, forward, 1, 128) @ squares.t()),
        (input_gradient(float8, grad, weight), rounded_by_blocks(grad, backward, 1, 128) @ squares),
        (
            weight_gradient(float8, grad, x),
            rounded_by_blocks(grad, backward, 128, 1).t() @ rounded_by_blocks(x, forward, 128, 1),
        ),
    )
    for found, expected in pairs:
        torch.testing.assert_close(
            found.double(), expected, rtol=2**-8, atol=float(expected.abs().max()) * 2e-3
        )


RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed")


def kept_by(float8: Float8, weight: Tensor) -> Kept:
    delayed = float8.recipe == "delayed"
    largest = torch.tensor([4.0, 4.0], requires_grad=True) if delayed else None
    return Kept(float8.weight_rows(weight, NOTHING_KEPT), largest, delayed)


def gradients(x: Tensor, weight: Tensor, float8: Float8, kept: Kept) -> list[Tensor]:
    inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    found = linear(*inputs, None, float8, kept)
    return [found, *torch.autograd.grad(found, inputs, draw(128, 384, seed=2))]


@pytest.mark.parametrize("recipe", sampled(RECIPES, lambda recipe: recipe != "tensorwise"))
def test_a_kept_weight_gives_the_same_bits(recipe):
    float8, x, weight = Float8(True, recipe), draw(128, 256), draw(384, 256, seed=1)
    kept = kept_by(float8, weight)
    found, expected = (gradients(x, weight, float8, k) for k in (kept, kept._replace(weight=None)))
    assert all(map(torch.equal, found, expected))
    exact = [x.double() @ weight.t().double()]
    exact += [draw(128, 384, seed=2).double() @ weight.double()]
    exact += [draw(128, 384, seed=2).t().double() @ x.double()]
    for ours, theirs, limit in zip(found, exact, (0.04, 0.07, 0.07), strict=True):
        assert limit / 4 < float((ours.double() - theirs).norm() / theirs.norm()) < limit


@pytest.mark.parametrize("recipe", sampled(RECIPES, "tensorwise".__ne__))
def test_one_byte_of_an_input_is_saved(recipe):
    float8, x, weight = Float8(True, recipe), draw(128, 256), draw(384, 256, seed=1)
    kept, saved = kept_by(float8, weight), []
    held = {each.data_ptr() for each in (*(kept.weight or ()), weight)}

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x.requires_grad_(), weight.requires_grad_(), None, float8, kept)
    own = [tensor for tensor in saved if tensor.data_ptr() not in held]
    scales = {"rowwise": 256 * 4, "blockwise": 256 * 4}.get(recipe, 4)
    assert sum(tensor.nbytes for tensor in own if tensor.dtype == torch.float8_e4m3fn) == 128 * 256
    assert sum(t.nbytes for t in own if t.dtype != torch.float8_e4m3fn) <= scales + 12


class Count(TorchDispatchMode):
    """Counts operators by name and the shape of their first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, torch.Size]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], Tensor):
            self.calls[func.overloadpacket.__name__, args[0].shape] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", sampled(["tensorwise", "delayed"], "delayed".__eq__))
def test_the_largest_magnitude_is_found_once_for_each_tensor(recipe):
    float8, x, weight = Float8(True, recipe), draw(128, 256), draw(384, 256, seed=1)
    kept = kept_by(float8, weight)
    with Count() as count:
        gradients(x, weight, float8, kept)
    norms = {shape: n for (name, shape), n in count.calls.items() if name == "linalg_vector_norm"}
    assert norms == {x.shape: 1, torch.Size((128, 384)): 1}


def test_delayed_scales_are_those_that_were_given():
    """Larger numbers become the largest; both magnitudes come back as gradients."""
    float8, x, weight = Float8(True, "delayed"), draw(32, 64), draw(48, 64, seed=1)
    grad = draw(32, 48, seed=2)
    largest = torch.tensor([float(x.abs().max()) / 2, float(grad.abs().max()) * 4])
    largest.requires_grad_()
    kept = Kept(None, largest, True)
    inputs = [x.requires_grad_(), weight.requires_grad_(), largest]
    y = linear(*inputs[:2], None, float8, kept)
    found = [y, *torch.autograd.grad(y, inputs, grad)]
    limits = (448.0, 57344.0)
    x8, g8 = (
        (v.detach().float() * (limit / m)).clamp(-limit, limit).to(dtype).double() * m / limit
        for v, limit, m, dtype in zip(
            (x, grad), limits, largest.tolist(), (torch.float8_e4m3fn, torch.float8_e5m2),
            strict=True,
        )
    )  # fmt: skip
    w8 = rounded(weight.detach(), torch.float8_e4m3fn, None)
    for ours, theirs in zip(found[:3], (x8 @ w8.t(), g8 @ w8, g8.t() @ x8), strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=2**-7, atol=float(theirs.abs().max()) * 2e-3
        )
    assert found[3].tolist() == [float(x.abs().max()), float(grad.abs().max())]
    unmeasured = linear(*inputs[:2], None, float8, kept._replace(measured=False))
    assert torch.equal(unmeasured, linear(*inputs[:2], None, Float8(True)))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_overflows_are_seen_by_every_recipe(recipe, value):
    float8, x, weight = Float8(True, recipe), draw(128, 256), draw(384, 256, seed=1)
    x[3, 5] = value
    assert linear(x, weight, None, float8, kept_by(float8, weight))[3].isnan().all()


def test_blocks_need_tokens_of_whole_blocks():
    weight = draw(128, 128).requires_grad_()
    with pytest.raises(ValueError, match="64 tokens of a micro batch are not a multiple of 128"):
        linear(draw(64, 128), weight, None, Float8(True, "blockwise"))


@pytest.mark.proof
@pytest.mark.parametrize(("delayed", "most"), [(False, 7.1), (True, 5.1)])
def test_the_compiler_finds_the_largest_magnitude_within_the_norm(delayed, most):
    """Bytes for each number of a normalised matrix, which is not written itself. Read for the norm
    and its largest magnitude, read and written in 8 bits, and transposed: 2 + (2 + 1) + (1 + 1);
    with a scale of earlier steps the second reading is spared."""
    if missing_compiler("cpu"):
        pytest.skip(missing_compiler("cpu"))
    x, weight = draw(256, 1024), torch.ones(1024).bfloat16()
    largest = torch.tensor(4.0) if delayed else None

    def normed_in_8_bits(x: Tensor, weight: Tensor) -> tuple:
        y = F.rms_norm(x.float(), (1024,), weight.float(), 1e-5).to(x.dtype)
        found = cast(y, torch.float8_e4m3fn, "tensor", rows=True, columns=True, earlier=largest)
        return found.rows, found.columns

    assert compiled_traffic(normed_in_8_bits, x, weight) / x.numel() < most
