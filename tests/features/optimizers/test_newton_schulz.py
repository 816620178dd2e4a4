"""Newton-Schulz steps against singular values, and one step of Muon against torch's."""

import pytest
import torch
from torch import nn

from megatron.features.optimizers.coefficients import COEFFICIENTS
from megatron.features.optimizers.muon import Muon, MuonSettings
from megatron.features.optimizers.newton_schulz import orthogonalise, scale, steps_of
from megatron.features.optimizers.rules import Adam, Lion, RuledOptimizer
from megatron.features.optimizers.whole import in_order
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Shard


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (3, 8, 4)])
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_singular_values_follow_the_polynomial(name, shape):
    """Reference: the polynomial of each singular value, with the vectors of LAPACK."""
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    steps = steps_of(name, 7)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    values = values / torch.linalg.matrix_norm(x)[..., None]
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    expected = u * values[..., None, :] @ v
    torch.testing.assert_close(orthogonalise(x, steps, x.dtype), expected, rtol=0, atol=1e-12)


def test_more_steps_than_coefficients():
    assert steps_of("quintic", 6)[5] == COEFFICIENTS["quintic"][0][0]
    assert steps_of("polar_express", 9)[8] == COEFFICIENTS["polar_express"][0][-1]


def test_a_matrix_of_zeros_stays_zero():
    zeros = torch.zeros(3, 4)
    assert torch.equal(orthogonalise(zeros, steps_of("simple", 5), torch.float32), zeros)


def test_scales():
    assert scale("spectral", 4, 9) == 3
    assert scale("unit_rms_norm", 4, 16) == 0.5
    assert scale("shape_scaling", 4, 16) == 1 and scale("shape_scaling", 16, 4) == 2


def muon_of(param: nn.Parameter, rows, **changed) -> RuledOptimizer:
    param.shard = Shard(tuple(param.shape))  # type: ignore[attr-defined]
    settings = dict(
        momentum=0.95, nesterov=True, coefficients=steps_of("simple", 5),
        scale_mode="shape_scaling", factor=1.0, product_dtype=torch.bfloat16,
    )  # fmt: skip
    rule = Muon(MuonSettings(**settings | changed), {param: "w"}, lambda _: in_order(rows), Mesh())
    rule.place_of = lambda param: (0, param, 0, param.numel())
    groups = [{"params": [param], "rule": "muon"}]
    return RuledOptimizer(groups, {"muon": rule}, {"lr": 0.02, "weight_decay": 0.1})


def gradients(*shape: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=random, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_steps_equal_those_of_torch(shape):
    """Reference: torch.optim.Muon, whose products are in bfloat16."""
    ours, theirs = (nn.Parameter(gradients(*shape)[0].clone()) for _ in range(2))
    steps = [muon_of(ours, shape[:1]), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)]
    for grad in gradients(*shape):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        for optimizer in steps:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


def test_fused_matrices_are_updated_as_if_apart():
    shape, rows = (14, 6), (8, 4, 2)
    start, *grads = gradients(*shape, dtype=torch.float64)
    fused = nn.Parameter(start.clone())
    apart = [nn.Parameter(part.clone()) for part in start.split(rows)]
    optimizers = [muon_of(p, (r,)) for p, r in zip(apart, rows, strict=True)]
    whole = muon_of(fused, rows)
    for grad in grads:
        fused.grad = grad
        whole.step()
        for param, part, optimizer in zip(apart, grad.split(rows), optimizers, strict=True):
            param.grad = part
            optimizer.step()
    torch.testing.assert_close(fused.data, torch.cat(apart).data, rtol=0, atol=1e-14)


def test_adam_is_torchs():
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    groups = [{"params": [ours], "rule": "adam"}]
    rules = {"adam": Adam((0.9, 0.95), 1e-8)}
    optimizer = RuledOptimizer(groups, rules, {"lr": 0.1, "weight_decay": 0.01})
    reference = torch.optim.AdamW(
        [theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    for grad in gradients(5):
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


def test_lion_is_the_algorithm():
    """Reference: algorithm 2 of Chen et al. 2023, with its own variables."""
    start, *grads = gradients(200, dtype=torch.float64)
    param = nn.Parameter(start.clone())
    groups = [{"params": [param], "rule": "lion"}]
    rules = {"lion": Lion((0.95, 0.98))}
    optimizer = RuledOptimizer(groups, rules, {"lr": 0.1, "weight_decay": 0.01})
    theta, m = start.clone(), torch.zeros_like(start)
    for g in grads:
        param.grad = g
        optimizer.step()
        c = 0.95 * m + 0.05 * g
        theta = theta - 0.1 * (torch.sign(c) + 0.01 * theta)
        m = 0.98 * m + 0.02 * g
    torch.testing.assert_close(param.data, theta, rtol=0, atol=1e-14)
