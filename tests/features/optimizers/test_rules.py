"""Rules of single elements, of blocks and of eigenbases against their publications, in float64."""

import math

import pytest
import torch
from torch import nn

from megatron.features.optimizers.adam_mini import AdamMini
from megatron.features.optimizers.ademamix import AdEMAMix
from megatron.features.optimizers.fused import rows_of
from megatron.features.optimizers.rules import Adam, RuledOptimizer, UpdateRule
from megatron.features.optimizers.schedule_free import ScheduleFree
from megatron.features.optimizers.soap import Soap, SoapSettings
from megatron.features.optimizers.whole import in_order
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Cut, Shard
from megatron.run.run import parse_run

LR, DECAY, BETA1, BETA2, EPS = 0.1, 0.05, 0.9, 0.95, 1e-8
SOAP_EPS = 1e-3
"""Larger than rounding of elements that are 0 in the eigenbases of the first step."""


def draws(*shape: int, count: int = 6) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=random, dtype=torch.float64) for _ in range(count)]


def after(rule: UpdateRule, start: torch.Tensor, grads, rates=None, **options) -> nn.Parameter:
    """The parameter after a step with each gradient, at the rates of the steps. ``factor`` is the
    parameter's own rate over the run's."""
    param = nn.Parameter(start.clone())
    return continued(rule, param, grads, rates, **options)


def continued(rule: UpdateRule, param: nn.Parameter, grads, rates=None, factor=1.0, **options):
    if not hasattr(param, "shard"):
        param.shard = Shard(tuple(param.shape))  # type: ignore[attr-defined]
    rule.place_of = lambda _: (0, param, 0, param.numel())
    defaults = {"lr": LR, "weight_decay": DECAY, **options}
    optimizer = RuledOptimizer([{"params": [param], "rule": "rule"}], {"rule": rule}, defaults)
    for grad, rate in zip(grads, rates or [LR] * len(grads), strict=True):
        optimizer.param_groups[0].update(lr=factor * rate, common_lr=rate)
        param.grad = grad.clone()
        optimizer.step()
    param.optimizer = optimizer  # type: ignore[attr-defined]
    return param


def close(param: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(param.data, expected, rtol=0, atol=1e-12)


def test_ademamix_is_the_algorithm():
    """Reference: algorithm 1 of Pagliardini et al. 2024, and its schedulers in appendix A.1, with
    the half-life solved by its definition."""
    start, *grads = draws(7)
    rule = AdEMAMix((BETA1, BETA2, 0.999), EPS, 5.0, 4)
    param = after(rule, start, grads)
    theta, m1, m2, v = start.clone(), 0.0, 0.0, 0.0
    half = [math.log(0.5) / math.log(beta) - 1 for beta in (BETA1, 0.999)]
    for t, g in enumerate(grads, 1):
        life = half[0] + (half[1] - half[0]) * min(1, t / 4)
        beta3, alpha = 0.5 ** (1 / (life + 1)), 5.0 * min(1, t / 4)
        m1, m2 = BETA1 * m1 + (1 - BETA1) * g, beta3 * m2 + (1 - beta3) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        first, second = m1 / (1 - BETA1**t), v / (1 - BETA2**t)
        theta = theta - LR * ((first + alpha * m2) / (second.sqrt() + EPS) + DECAY * theta)
    close(param, theta)


def test_cautious_updates_follow_the_gradient():
    """Reference: the authors' C-AdamW (C-Optim, c_adamw.py), with its least share of 1e-3."""
    start, *grads = draws(7)
    param = nn.Parameter(start.clone())
    rule = Adam((BETA1, BETA2), EPS, ({param: "weight"}, Mesh()))
    continued(rule, param, grads)
    theta, m, v = start.clone(), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        mask = (m * g > 0).to(g.dtype)
        mask = mask / mask.mean().clamp(min=1e-3)
        size = (v / (1 - BETA2**t)).sqrt() + EPS
        theta = theta * (1 - LR * DECAY) - LR * m * mask / (1 - BETA1**t) / size
    close(param, theta)


def test_schedule_free_is_the_algorithm():
    """Reference: algorithm 1 of Defazio et al. 2024 with its three sequences, of which the means
    have the weights of the squares of the largest rate until then."""
    start, *grads = draws(7)
    rates = [0.02, 0.05, 0.1, 0.1, 0.04]
    rule = ScheduleFree((BETA1, BETA2), EPS, Mesh())
    y_of_run = after(rule, start, grads, rates)
    x = y = z = start.clone()
    v, total, highest = 0.0, 0.0, 0.0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), 1):
        v = BETA2 * v + (1 - BETA2) * g * g
        z = z - rate * (g / ((v / (1 - BETA2**t)).sqrt() + EPS) + DECAY * y)
        highest = max(highest, rate)
        total += highest**2
        c = highest**2 / total
        x = (1 - c) * x + c * z
        y = (1 - BETA1) * z + BETA1 * x
    close(y_of_run, y)
    close(rule.mean(y_of_run.data, y_of_run.optimizer.state[y_of_run]["z"]), x)


def test_adam_mini_has_a_moment_for_each_block():
    """Reference: algorithm 2 of Zhang et al. 2024: means of squares of each head of queries and
    keys, and of each row of values."""
    start, *grads = draws(12, 5)
    param = nn.Parameter(start.clone())
    param.shard = Shard((12, 5), (Cut(0, parts=(4, 4, 4)),))  # type: ignore[attr-defined]
    rule = AdamMini((BETA1, BETA2), EPS, {param: "layers.0.attention.qkv.weight"}, 2, Mesh())
    continued(rule, param, grads)
    blocks = [range(n, n + 2) for n in range(0, 8, 2)] + [range(n, n + 1) for n in range(8, 12)]
    theta, m, v = start.clone(), torch.zeros(12, 5).double(), dict.fromkeys(range(8), 0.0)
    for t, g in enumerate(grads, 1):
        m = BETA1 * m + (1 - BETA1) * g
        theta = theta * (1 - LR * DECAY)
        for n, rows in enumerate(blocks):
            part = [*rows]
            v[n] = BETA2 * v[n] + (1 - BETA2) * float((g[part] ** 2).mean())
            size = math.sqrt(v[n] / (1 - BETA2**t)) + EPS
            theta[part] -= LR * m[part] / (1 - BETA1**t) / size
    close(param, theta)


@pytest.mark.parametrize(
    "name, shape, moments",
    [("layers.0.norm.weight", (6,), 1), ("layers.0.mlp.up.bias", (6,), 6),
     ("layers.0.mlp.down.weight", (6, 4), 6), ("layers.0.mlp.experts.up.weight", (2, 6, 4), 12)],
)  # fmt: skip
def test_blocks_of_adam_mini(name, shape, moments):
    """A norm is one block, elements of biases are one each, and so are rows."""
    param = nn.Parameter(torch.zeros(shape))
    param.shard = Shard(shape)  # type: ignore[attr-defined]
    blocks = AdamMini((0.9, 0.95), 1e-8, {param: name}, 2, Mesh()).blocks[param]
    assert blocks.count == moments
    assert int(blocks.sizes_B.sum()) == param.numel()


@pytest.mark.parametrize("kl", [False, True], ids=["soap", "kl"])
@pytest.mark.parametrize("shape", [(5, 5), (2, 4, 4)], ids=["matrix", "experts"])
def test_soap_is_adam_in_eigenbases(shape, kl):
    """Reference: algorithm 3 of Vyas et al. 2024 with the factors of this step, and for KL those of
    Lin et al. 2025, equation 8; each matrix by itself. Square ones: factors of others begin with
    eigenvectors of the value 0, of which any are right."""
    start, *grads = draws(*shape)
    param = nn.Parameter(start.clone())
    param.shard = Shard(shape)  # type: ignore[attr-defined]
    rule = Soap(
        SoapSettings((BETA1, BETA2), SOAP_EPS, 0.95, 2, kl),
        {param: "w"}, lambda _: in_order(shape[-2:-1]), Mesh(),
    )  # fmt: skip
    continued(rule, param, grads)
    whole = (each.view(-1, *shape[-2:]) for each in (start, *grads))
    expected = [soap(w, g, kl) for w, *g in zip(*(each.unbind() for each in whole), strict=True)]
    close(param, torch.stack(expected).view(shape))


def soap(w: torch.Tensor, grads: list[torch.Tensor], kl: bool) -> torch.Tensor:
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    sides = [torch.zeros(n, n, dtype=w.dtype) for n in w.shape]
    bases = [torch.eye(n, dtype=w.dtype) for n in w.shape]
    values = [torch.ones(n, dtype=w.dtype) for n in w.shape]
    for t, g in enumerate(grads, 1):
        weight = 0.05 / (1 - 0.95**t)
        new = []
        for side in (0, 1):
            x, other = (g, g.T)[side], 1 - side
            inner = (
                bases[other] @ torch.diag(1 / values[other].clamp(min=SOAP_EPS)) @ bases[other].T
            )
            inner = inner / x.shape[1] if kl else torch.eye(x.shape[1], dtype=w.dtype)
            new.append((1 - weight) * sides[side] + weight * x @ inner @ x.T)
        sides = new
        if t == 1 or t % 2 == 0:
            back = bases[0] @ m @ bases[1].T
            for side in (0, 1):
                if t == 1:
                    bases[side] = torch.linalg.eigh(sides[side])[1].flip(1)
                else:
                    sizes = torch.diag(bases[side].T @ sides[side] @ bases[side])
                    order = sizes.argsort(descending=True)
                    v = v[order] if side == 0 else v[:, order]
                    bases[side] = torch.linalg.qr((sides[side] @ bases[side])[:, order])[0]
                values[side] = torch.diag(bases[side].T @ sides[side] @ bases[side])
            m = bases[0].T @ back @ bases[1]
        w = w * (1 - LR * DECAY)
        if t == 1:
            continue
        turned = bases[0].T @ g @ bases[1]
        m, v = BETA1 * m + (1 - BETA1) * turned, BETA2 * v + (1 - BETA2) * turned**2
        update = m / (1 - BETA1 ** (t - 1)) / ((v / (1 - BETA2 ** (t - 1))).sqrt() + SOAP_EPS)
        w = w - LR * bases[0] @ update @ bases[1].T
    return w


def test_soap_whitens_a_gradient_that_comes_again():
    """The first gradient sets the bases, in which it is diagonal: Adam's update is its sign."""
    (grad,) = draws(4, 4, count=1)
    first, second = updates(SoapSettings((BETA1, BETA2), 1e-10, 0.95, 10, False), [grad, grad])
    assert not first.any()
    torch.testing.assert_close(second @ second.T, torch.eye(4).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kl", [False, True], ids=["soap", "kl"])
@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_updates_of_soap_keep_their_size(every, kl):
    """Adam's elements are at most about 1 in size, however often the bases change."""
    mean, *noise = draws(16, 16, count=12)
    settings = SoapSettings((BETA1, BETA2), 1e-10, 0.95, every, kl)
    for update in updates(settings, [mean + each for each in noise]):
        assert update.square().mean().sqrt() < 2


def updates(settings: SoapSettings, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    rule = Soap(settings, {}, lambda _: in_order(grads[0].shape[:1]), Mesh())
    states = rule.create_whole(grads[0])
    return [rule._update(grad, states, float(count)) for count, grad in enumerate(grads, 1)]


def test_soap_of_rows_without_gradient_is_finite():
    """LAPACK's eigenvectors of such factors are NaN in float32, for these seeds in some builds."""
    settings = SoapSettings((BETA1, BETA2), 1e-8, 0.95, 10, False)
    rule = Soap(settings, {}, lambda _: in_order((128,)), Mesh())
    for seed in (28, 130, 146):
        drawn = torch.Generator().manual_seed(seed)
        grad = torch.randn(128, 32, generator=drawn) * 1e-4
        grad[torch.rand(128, generator=drawn) < 0.45] = 0
        states = rule.create_whole(grad)
        for count in (1.0, 2.0):
            assert rule._update(grad, states, count).isfinite().all()
        assert all(state.is_contiguous() for state in states.values())


@pytest.mark.parametrize(
    "rule", [Adam((BETA1, BETA2), EPS), AdEMAMix((BETA1, BETA2, 0.99), EPS, 0.0, 0)]
)
def test_cautious_decay_leaves_weights_that_grow(rule):
    """Reference: Adam with the decay of those weights only whose size its update reduces."""
    start, *grads = draws(9)
    theta, m, v = start.clone(), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        update = m / (1 - BETA1**t) / ((v / (1 - BETA2**t)).sqrt() + EPS)
        theta = theta - LR * update - LR * DECAY * theta * (update * theta >= 0)
    close(after(rule, start, grads, cautious=True), theta)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_decay_follows_the_rate(factor):
    """AdamC: decay of a step is multiplied by the run's learning rate over its peak, also where a
    parameter's own rate is another, such as --decoupled-lr."""
    start, *grads = draws(5, count=4)
    rates = [0.05, 0.1, 0.02]
    param = after(Adam((BETA1, BETA2), EPS), start, grads, rates, factor=factor, peak_lr=0.1)
    theta, m, v = start.clone(), 0.0, 0.0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), 1):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        update = m / (1 - BETA1**t) / ((v / (1 - BETA2**t)).sqrt() + EPS)
        theta = theta - factor * rate * (update + rate / 0.1 * DECAY * theta)
    close(param, theta)


GATED = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 1 "
    "--lr 1 --micro-batch-size 1 --tokenizer-type NullTokenizer --vocab-size 99 --mock-data "
    "--optimizer muon --attention-output-gate"
).split()


def test_only_what_is_fused_is_divided():
    """Of an addition to the projection of gated attention, the second factor has its rows, and the
    first one has none of them."""
    config, name = parse_run(None, GATED).config, "layers.0.attention.qkv."
    assert rows_of(f"{name}lora_a", Shard((4, 32)), config) == in_order((4,))
    fused = Shard((128, 4), (Cut(0, parts=(64, 32, 32)),))
    queries, gates, keys, values = rows_of(f"{name}lora_b", fused, config)
    assert torch.as_tensor(queries).tolist() == [r for r in range(64) if r % 16 < 8]
    assert torch.as_tensor(gates).tolist() == [r for r in range(64) if r % 16 >= 8]
    assert [keys, values] == in_order((64, 32, 32))[1:]
