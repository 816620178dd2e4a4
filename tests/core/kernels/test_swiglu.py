"""Gated activations: the operator's formula against the path without it, and definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron.config.blocks import GATES as NAMES
from megatron.config.blocks import MLPConfig
from megatron.kernels.swiglu import GATES, _formula, gated, swiglu, swiglu_backward
from megatron.model.activations import activation_of

OPTIONS = {"plain": (None, 0.0), "clamped": (1.5, 1.0)}
CASES = [(kind, *option) for kind in NAMES for option in OPTIONS.values()]

DEFINITIONS = {
    "swiglu": lambda g: g / (1 + math.exp(-g)),
    "geglu": lambda g: g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "geglu_erf": lambda g: g / 2 * (1 + math.erf(g / math.sqrt(2))),
    "quick_geglu": lambda g: g / (1 + math.exp(-1.702 * g)),
    "squared_reglu": lambda g: max(g, 0) ** 2,
}


def today(kind, clamp, offset):
    return activation_of(
        MLPConfig(
            ffn_hidden_size=1,
            activation=kind,
            bias=False,
            activation_func_clamp_value=clamp,
            glu_linear_offset=offset,
        )
    )


def test_there_is_an_operator_for_every_gate():
    assert set(GATES) == set(NAMES) == set(DEFINITIONS)


@pytest.mark.parametrize("kind, clamp, offset", CASES)
def test_formula_against_the_definition(kind, clamp, offset):
    gates, ups = [-7.0, -1.28, -0.1, 0.0, 0.4, 1.5, 9.0], [2.0, -3.0, 0.5, 1.0, -1.5, 1.4, -0.2]
    x = torch.tensor([gates + ups], dtype=torch.float64)
    if clamp is not None:
        gates = [min(g, clamp) for g in gates]
        ups = [max(-clamp, min(u, clamp)) for u in ups]
    expected = [DEFINITIONS[kind](g) * (u + offset) for g, u in zip(gates, ups, strict=True)]
    y, largest = swiglu(x, kind, clamp, offset, True)
    torch.testing.assert_close(y, torch.tensor([expected], dtype=y.dtype), rtol=1e-14, atol=1e-14)
    assert largest.item() == pytest.approx(max(map(abs, expected)), rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind, clamp, offset", CASES)
def test_formula_equals_the_path_without_it(kind, clamp, offset, dtype):
    """Bit for bit: values, and for swiglu gradients."""
    torch.manual_seed(0)
    x = (3 * torch.randn(2, 3, 34, dtype=dtype)).requires_grad_()
    grad = torch.randn(2, 3, 17, dtype=dtype)
    results = []
    for function in (today(kind, clamp, offset), lambda x: gated(x, kind, clamp, offset)):
        y = function(x)
        results.append((y, *torch.autograd.grad(y, x, grad)))
    (y, x_grad), (ours, our_grad) = results
    assert torch.equal(ours, y)
    if kind == "swiglu":
        assert torch.equal(our_grad, x_grad)
    torch.testing.assert_close(our_grad, x_grad, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", NAMES)
def test_results_are_rounded_once(kind, dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 34).to(dtype)
    y, _ = swiglu(x, kind, None, 0.0, False)
    assert torch.equal(y, today(kind, None, 0.0)(x.float()).to(dtype))


@pytest.mark.parametrize("kind, clamp, offset", CASES)
def test_gradients(kind, clamp, offset):
    torch.manual_seed(0)
    x = (2 * torch.randn(3, 10, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: swiglu(x, kind, clamp, offset, False)[0], (x,))


def test_the_operators_agree_with_their_shapes():
    x, grad = torch.randn(3, 10, requires_grad=True), torch.randn(3, 5)
    torch.library.opcheck(swiglu, (x, "swiglu", 1.0, 1.0, True))
    torch.library.opcheck(swiglu_backward, (x.detach(), grad, "geglu", None, 0.0, False))


def test_the_largest_magnitude_of_a_gradient():
    torch.manual_seed(0)
    x, grad = torch.randn(4, 10).bfloat16(), torch.randn(4, 5).bfloat16()
    result, largest = swiglu_backward(x, grad, "swiglu", None, 0.0, True)
    assert largest.item() == result.float().abs().max().item() > 0
    _, none = swiglu_backward(x, grad, "swiglu", None, 0.0, False)
    assert none.shape == (0,)


def test_rows_of_another_layout():
    torch.manual_seed(0)
    x = torch.randn(2, 12, 3).transpose(1, 2)
    # torch rounds the exponential of contiguous and of other rows differently.
    expected = F.silu(x[..., :6]) * x[..., 6:]
    torch.testing.assert_close(gated(x, "swiglu", None, 0.0), expected, rtol=1e-6, atol=1e-7)
    nothing = gated(torch.zeros(0, 12), "swiglu", None, 0.0)
    assert nothing.shape == (0, 6)
    assert _formula(torch.zeros(0, 12), "swiglu", None, 0.0, True)[1].tolist() == [0.0]
