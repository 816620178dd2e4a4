"""The norm of gradients against float64, and how it is summed."""

import pytest
import torch
from torch import nn

from megatron.engine.update.optimizer import clipping_factor, gradient_norm, norm_of_groups
from megatron.parallel.mesh import SINGLE, Mesh
from megatron.parallel.shard import Shard

CPU = torch.device("cpu")
SHAPES = ((3, 5), (1024,), (1025,), (700, 3000), (1,))


def params(dtype: torch.dtype) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(1)
    found = []
    for shape in SHAPES:
        param = nn.Parameter(torch.empty(shape, dtype=dtype))
        param.shard = Shard(shape)
        param.grad = (1e-3 * torch.randn(shape, generator=made)).to(dtype)
        found.append(param)
    return found


def exact(given: list[nn.Parameter]) -> float:
    squares = [param.grad.double().pow(2).sum() for param in given if param.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_against_float64(dtype):
    """Two million squares, one added after the other in float32, would be wrong by 2e-5."""
    given = params(dtype)
    norm = gradient_norm(given, Mesh())
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(norm) == pytest.approx(
        exact(given), rel=1e-12 if norm.dtype.itemsize > 4 else 2e-7
    )


@pytest.mark.parametrize("sums", [torch.float32, torch.float64])
def test_groups_and_empty_groups(sums):
    given = params(torch.bfloat16)
    grads = [[p.grad for p in given[:2]], [], [p.grad for p in given[2:]]]
    norm = norm_of_groups(grads, sums, torch.float32, [SINGLE], CPU)
    assert float(norm) == pytest.approx(exact(given), rel=2e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("shape", [0, 3])
def test_one_bad_number_shows(bad, shape):
    given = params(torch.float32)
    given[shape].grad.view(-1)[-1] = bad
    assert not gradient_norm(given, Mesh()).isfinite()


def test_transposed_gradient():
    given = params(torch.float32)
    given[3].grad = given[3].grad.t().contiguous().t()
    assert float(gradient_norm(given, Mesh())) == pytest.approx(exact(given), rel=2e-7)


def test_clipping_factor():
    assert float(clipping_factor(torch.tensor(0.5), 1.0)) == 1.0
    assert float(clipping_factor(torch.tensor(4.0), 1.0)) == pytest.approx(0.25)
