"""Operators of two bodies: registration, gradients, compilation, switches."""

import pytest
import torch

from megatron.kernels import operators
from megatron.kernels.switches import SWITCHES, switched, uses


def _double(x):
    return 2 * x, x.abs().amax()


def _shapes(x):
    return torch.empty_like(x), x.new_empty(())


DOUBLE = operators.define(
    "test_double(Tensor x) -> (Tensor, Tensor)",
    _double,
    _shapes,
    save=lambda ctx, inputs, output: None,
    backward=lambda ctx, y_grad, largest_grad: 2 * y_grad,
)


def test_an_operator_agrees_with_its_shapes_and_gradients():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(DOUBLE, (x,))
    assert torch.autograd.gradcheck(lambda x: DOUBLE(x)[0], (x,))


def test_an_operator_breaks_no_graph():
    x = torch.randn(3, 5, requires_grad=True)
    compiled = torch.compile(lambda x: DOUBLE(x + 1)[0] * 3, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(y, (2 * (x + 1)) * 3)
    assert torch.equal(x.grad, torch.full_like(x, 6.0))


def test_an_operator_mutates_its_argument():
    def add(x, y):
        x.add_(y)

    name = "test_add_(Tensor(a!) x, Tensor y) -> ()"
    add_ = operators.define(name, add, lambda x, y: None)
    x, y = torch.zeros(3), torch.ones(3)
    torch.library.opcheck(add_, (x.clone(), y))
    torch.compile(lambda x, y: add_(x, y * 2), fullgraph=True, backend="aot_eager")(x, y)
    assert torch.equal(x, torch.full((3,), 2.0))


def test_no_kernel_processes_tensors_of_a_cpu_or_what_is_switched_off():
    assert not any(uses(name, torch.ones(3)) for name in SWITCHES)
    with switched(swiglu=False):
        assert not SWITCHES["swiglu"]
    assert SWITCHES["swiglu"]
    with pytest.raises(KeyError), switched(no_such_kernel=True):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_kernel_gets_the_dtypes_that_it_computes_with(monkeypatch, dtype):
    """Not float64, for which the formula runs on a GPU too."""
    monkeypatch.setattr(operators, "missing_compiler", lambda device: None)
    assert operators._computes((torch.ones(3, dtype=dtype), 3)) == (dtype != torch.float64)
    monkeypatch.setattr(operators, "missing_compiler", lambda device: "no triton")
    assert not operators._computes((torch.ones(3, dtype=dtype),))
