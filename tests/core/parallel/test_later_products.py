"""Products for gradients of weights that a backward pass leaves, against autograd's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.parallel.later_products import add_products, products_later
from megatron.parallel.linear import linear


class Layers(nn.Module):
    """Linear layers of which one is used several times, with what is not a linear layer between."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.uses = uses
        self.first, self.again, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last.bias = None

    def forward(self, x_BSI: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        def blocks(x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.uses):
                x = self.norm(torch.tanh(linear(x, self.again.weight, self.again.bias, None)))
            return linear(x, self.frozen.weight, self.frozen.bias, None)

        x = linear(x_BSI, self.first.weight, self.first.bias, None)
        x = checkpoint(blocks, x, use_reentrant=False) if recompute else blocks(x)
        return linear(x, self.last.weight, self.last.bias, None).square().sum()


def gradients(model):
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_bits_with_one_gradient_each(recompute, autocast):
    # Autocast sums the gradients of several uses of a weight in its own dtype.
    uses = 1 if autocast else 3
    model, whole = Layers(uses), Layers(uses)
    counts = dict.fromkeys(dict(model.named_parameters()), 0)
    for name, param in model.named_parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(
                lambda _, name=name: counts.update({name: counts[name] + 1})
            )
    for _ in range(2):  # two micro batches, summed
        x_BSI, left = torch.randn(3, 4, 5), []
        mine, theirs = x_BSI.clone().requires_grad_(), x_BSI.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, autocast):
            with products_later(left):
                loss = model(mine, recompute)
            expected = whole(theirs, recompute)
        expected.backward()
        before = gradients(model)
        with products_later(left):
            loss.backward()
        assert len(left) == 2 + uses
        assert torch.equal(mine.grad, theirs.grad)
        assert all(gradients(model)[name] is before[name] for name in ("last.weight", "first.bias"))
        add_products(left)
        assert not left
        for name, grad in gradients(whole).items():
            ours = gradients(model)[name]
            assert (grad is None) == name.startswith("frozen") == (ours is None)
            assert grad is None or torch.equal(ours, grad), name
    assert counts == {name: 2 * (not name.startswith("frozen")) for name in counts}


def test_without_a_schedule_nothing_is_left():
    model, x_BSI = Layers(1), torch.randn(3, 4, 5)
    model(x_BSI).backward()
    assert model.first.weight.grad is not None


def test_what_stands_in_for_a_parameter_has_its_gradient_at_once():
    """A weight that is computed from a parameter, and a copy of one in a function of its own."""
    weight, x_BSI, left = nn.Parameter(torch.randn(2, 5)), torch.randn(3, 4, 5), []
    with products_later(left):
        linear(x_BSI, 2 * weight, None, None).sum().backward()
        copy = weight.detach().requires_grad_()
        linear(x_BSI, copy, None, None).sum().backward()
    assert not left
    expected = torch.autograd.grad(F.linear(x_BSI, weight).sum(), weight)[0]
    torch.testing.assert_close(weight.grad, 2 * expected)
    torch.testing.assert_close(copy.grad, expected)


def test_the_graph_is_not_kept():
    """A stage keeps only the inputs of linear layers, which the products need."""
    left, weight = [], nn.Parameter(torch.randn(5, 5))
    x_BSI = torch.randn(3, 4, 5, requires_grad=True)
    with products_later(left):
        y = linear(x_BSI, weight, None, None).exp()
        graph = y.grad_fn
        z = y.square()
        z.sum().backward()
    seen: list[object] = []
    ((params, compute),) = left
    for cell in compute.__closure__ or ():
        seen.append(cell.cell_contents)
    assert graph not in seen and not any(isinstance(s, torch.autograd.graph.Node) for s in seen)
    assert params == (weight, None)
