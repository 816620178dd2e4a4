"""Rows of experts and their products, against a dense loop over experts in float64.

Shapes: T tokens, E experts, K choices, H hidden, F inner width.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.blocks import MLPConfig
from megatron.features.experts import linear
from megatron.features.experts.compute import combine, dispatch, expert_mlp, order
from megatron.features.experts.linear import ExpertLinear
from megatron.model.activations import activation_of
from megatron.model.layer_list import initialise
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Init, shard_of
from megatron.parallel.tensor_parallel import TensorParallel

T, E, H, INNER = 13, 5, 16, 8
SWIGLU = activation_of(MLPConfig(ffn_hidden_size=1, activation="swiglu", bias=False))
Mlp = tuple[ExpertLinear, ExpertLinear]


def mlp(bias: bool = True, dtype: torch.dtype = torch.float64) -> Mlp:
    """The two layers of ``E`` experts, with drawn weights and biases."""
    how = dict(bias=bias, init=Init(0.4), tp=TensorParallel())
    up = ExpertLinear(E, (INNER, INNER), H, **how)
    down = ExpertLinear(E, (H,), INNER, **how)
    random = torch.Generator().manual_seed(3)
    for param in (*up.parameters(), *down.parameters()):
        param.data = torch.randn(param.shape, generator=random).mul_(0.4).to(dtype)
    return up, down


def draw(
    choices: int, kind: str = "any", dtype: torch.dtype = torch.float64, tokens: int = T
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T, H], the experts of their choices and the weights [T, K]; ``E`` is dropped."""
    random = torch.Generator().manual_seed(choices)
    x_TH = torch.randn(tokens, H, generator=random).to(dtype).requires_grad_()
    experts_TK = torch.rand(tokens, E, generator=random).argsort(-1)[:, :choices]
    if kind == "one":
        experts_TK = torch.full_like(experts_TK, 2)
    if kind == "few":
        experts_TK = experts_TK.clamp(max=1) * 3
    if kind == "dropped":
        experts_TK = experts_TK.masked_fill(torch.rand(tokens, choices, generator=random) < 0.4, E)
        experts_TK[1] = E
    weights_TK = torch.rand(tokens, choices, generator=random).to(dtype).requires_grad_()
    return x_TH, experts_TK, weights_TK


def separately(
    x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, layers: Mlp, on_device: bool = False
) -> Tensor:
    rows = order(experts_TK, E)
    sizes = rows.counts_E if on_device else rows.sizes
    assert sizes is not None
    up, down = layers
    return combine(down(SWIGLU(up(dispatch(x_TH, rows), sizes)), sizes), weights_TK, rows)


def together(x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, layers: Mlp) -> Tensor:
    return expert_mlp(x_TH, weights_TK, order(experts_TK, E), *layers, SWIGLU)


def dense(x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, layers: Mlp) -> Tensor:
    """Every token through every expert, times its weight there, expert by expert."""
    up, down = layers
    y_TH = torch.zeros_like(x_TH)
    for expert in range(E):
        bias, of_down = (None if one.bias is None else one.bias[expert] for one in layers)
        gate, inner = F.linear(x_TH, up.weight[expert], bias).chunk(2, -1)
        each_TH = F.linear(F.silu(gate) * inner, down.weight[expert], of_down)
        y_TH = y_TH + (weights_TK * (experts_TK == expert)).sum(1, keepdim=True) * each_TH
    return y_TH


def gradients(y_TH: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    grad = torch.randn(y_TH.shape, generator=torch.Generator().manual_seed(9)).to(y_TH.dtype)
    return torch.autograd.grad(y_TH, leaves, grad)


def assert_equal_to_dense(way: Callable[..., Tensor], case: tuple[Tensor, ...], layers: Mlp):
    x_TH, _, weights_TK = case
    leaves = (x_TH, weights_TK, *layers[0].parameters(), *layers[1].parameters())
    results = [(y, *gradients(y, *leaves)) for y in (way(*case, layers), dense(*case, layers))]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


WAYS = pytest.mark.parametrize("way", [separately, together])


@WAYS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("choices", "kind"),
    [(1, "any"), (2, "any"), (3, "dropped"), (5, "any"), (1, "one"), (2, "few"), (1, "dropped")],
)
def test_experts_against_a_dense_loop(way, choices, kind, bias):
    assert_equal_to_dense(way, draw(choices, kind), mlp(bias))


@WAYS
def test_eight_choices_of_which_some_are_the_same_expert(way):
    _, experts_TK, _ = draw(4)
    x_TH, _, weights_TK = draw(8)
    case = x_TH, torch.cat([experts_TK, experts_TK], -1), weights_TK
    assert_equal_to_dense(way, case, mlp())


@WAYS
@pytest.mark.parametrize(("tokens", "kind"), [(0, "any"), (2, "all dropped")])
def test_without_rows_gradients_are_zeros(way, tokens, kind):
    layers, (x_TH, experts_TK, weights_TK) = mlp(), draw(2, tokens=tokens)
    if kind == "all dropped":
        experts_TK = torch.full_like(experts_TK, E)
    leaves = (x_TH, weights_TK, *layers[0].parameters(), *layers[1].parameters())
    y_TH = way(x_TH, experts_TK, weights_TK, layers)
    assert y_TH.shape == (tokens, H) and not y_TH.any()
    for grad, leaf in zip(gradients(y_TH, *leaves), leaves, strict=True):
        assert grad.shape == leaf.shape and not grad.any()


def test_order_is_by_expert_and_then_by_token():
    rows = order(torch.tensor([[2, 0], [0, 3], [2, 3]]), 3)
    assert rows.rows_R.tolist() == [0, 1, 0, 2]
    assert rows.place_TK.tolist() == [[2, 0], [1, 4], [3, 4]]
    assert rows.counts_E.tolist() == rows.sizes == [2, 0, 2]


@WAYS
def test_numerical_gradients(way):
    layers, (x_TH, experts_TK, weights_TK) = mlp(), draw(2, "dropped", tokens=4)
    params = [*layers[0].parameters(), *layers[1].parameters()]

    def loss(x_TH: Tensor, weights_TK: Tensor, *_: Tensor) -> Tensor:
        return way(x_TH, experts_TK, weights_TK, layers)

    assert torch.autograd.gradcheck(loss, (x_TH, weights_TK, *params), fast_mode=True)


@WAYS
def test_frozen_weights_have_no_gradient_and_change_no_other(way):
    layers, case = mlp(), draw(2)
    x_TH, _, weights_TK = case
    expected = gradients(dense(*case, layers), x_TH, weights_TK, layers[1].bias)
    for param in (*layers[0].parameters(), layers[1].weight):
        param.requires_grad_(False)
    computed = gradients(way(*case, layers), x_TH, weights_TK, layers[1].bias)
    torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close_and_twice_the_same(way, dtype):
    layers, case = mlp(dtype=dtype), draw(3, "dropped", dtype)
    leaves = (case[0], case[2], *layers[0].parameters(), *layers[1].parameters())
    first, second = ((y, *gradients(y, *leaves)) for y in (way(*case, layers), way(*case, layers)))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_layers = mlp()
    for param, value in zip(
        (*exact_layers[0].parameters(), *exact_layers[1].parameters()), exact[2:], strict=True
    ):
        param.data = value.data
    y_TH = dense(exact[0], case[1], exact[1], exact_layers)
    params = (*exact_layers[0].parameters(), *exact_layers[1].parameters())
    expected = (y_TH, *gradients(y_TH, *exact[:2], *params))
    for ours, theirs in zip(first, expected, strict=True):
        assert ours.dtype == dtype
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < (1e-6 if dtype == torch.float32 else 0.02)


@WAYS
def test_autocast_computes_in_bfloat16_and_returns_gradients_of_the_parameters(way):
    layers, case = mlp(dtype=torch.float32), draw(2, dtype=torch.float32)
    leaves = (case[0], case[2], *layers[0].parameters(), *layers[1].parameters())
    with torch.autocast("cpu", torch.bfloat16):
        y_TH = way(*case, layers)
    assert y_TH.dtype == torch.bfloat16
    expected = gradients(dense(*case, layers), *leaves)
    for ours, theirs in zip(gradients(y_TH, *leaves), expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@WAYS
def test_grouped_kernel_computes_the_same(way, monkeypatch):
    """The kernel of GPUs, which torch emulates on CPUs, with counts as a tensor."""
    layers, case = mlp(dtype=torch.bfloat16), draw(3, "few", torch.bfloat16)
    leaves = (case[0], case[2], *layers[0].parameters(), *layers[1].parameters())

    def computed() -> tuple[Tensor, ...]:
        y_TH = way(*case, layers)
        return y_TH, *gradients(y_TH, *leaves)

    loop = computed()
    monkeypatch.setattr(linear, "_has_kernel", lambda x, param: True)
    for ours, theirs in zip(computed(), loop, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_counts_may_be_a_tensor():
    layers, case = mlp(), draw(2, "dropped")
    assert torch.equal(separately(*case, layers, on_device=True), separately(*case, layers))


def rank_of(axis: str, rank: int, ranks: int) -> TensorParallel:
    """A rank along one axis."""
    group = Group(tuple(range(ranks)), rank)
    return TensorParallel(group) if axis == "tensor" else TensorParallel(axes={(axis,): group})


def cut_mlp(rank: int, ranks: int, axis: str) -> Mlp:
    """One rank's share of :func:`mlp` where the experts, or each of them, are divided."""
    whole, coordinates = mlp(), {axis: (rank, ranks)}
    how = dict(bias=True, init=Init(0.4), tp=rank_of(axis, rank, ranks))
    each = axis == "tensor"
    up = ExpertLinear(E, (INNER, INNER), H, cut_outputs=each, **how)
    down = ExpertLinear(E, (H,), INNER, cut_inputs=each, **how)
    for ours, theirs in zip((up, down), whole, strict=True):
        for name, param in theirs.named_parameters():
            share = getattr(ours, name)
            share.data = shard_of(share).cut(param.data, coordinates)
    return up, down


@WAYS
def test_parts_of_experts_add_up(way):
    """Over two tensor-parallel ranks, whose outputs and gradients of inputs are summed; of the
    second bias both have the whole gradient."""
    case, whole, parts = draw(2, "dropped"), mlp(), [cut_mlp(n, 2, "tensor") for n in range(2)]
    x_TH, _, weights_TK = case
    outputs = [way(*case, part) for part in parts]
    expected = dense(*case, whole)
    torch.testing.assert_close(sum(outputs), expected, rtol=1e-12, atol=1e-12)
    grads = [
        gradients(y, x_TH, weights_TK, *up.parameters(), *down.parameters())
        for y, (up, down) in zip(outputs, parts, strict=True)
    ]
    params = (*whole[0].parameters(), *whole[1].parameters())
    of_x, of_weights, *of_params = gradients(expected, x_TH, weights_TK, *params)
    shares = [
        shard_of(param).cut(grad, {"tensor": (n, 2)})
        for n, (up, down) in enumerate(parts)
        for param, grad in zip((*up.parameters(), *down.parameters()), of_params, strict=True)
    ]
    torch.testing.assert_close(grads[0][0] + grads[1][0], of_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0][1] + grads[1][1], of_weights, rtol=1e-12, atol=1e-12)
    of_layers = [grad for results in grads for grad in results[2:]]
    torch.testing.assert_close(of_layers, shares, rtol=1e-12, atol=1e-12)


def test_initial_values_do_not_depend_on_the_layout():
    def drawn(init: Init, tp: TensorParallel, **cut: bool) -> Tensor:
        layer = ExpertLinear(4, (6, 6), 8, bias=False, init=init, tp=tp, **cut)
        initialise("layers.0.mlp.experts.up.weight", layer.weight, 7, tp.coordinates)
        return layer.weight.detach()

    for init in (Init(0.02), Init(xavier=True)):
        whole = drawn(init, TensorParallel())
        halves = [drawn(init, rank_of("expert", rank, 2)) for rank in range(2)]
        assert torch.equal(torch.cat(halves), whole)
        part = drawn(init, rank_of("tensor", 1, 2), cut_outputs=True)
        assert torch.equal(part, torch.cat([whole[:, 3:6], whole[:, 9:]], 1))
        inputs = drawn(init, rank_of("tensor", 1, 2), cut_inputs=True)
        assert torch.equal(inputs, whole[..., 4:])
    # Glorot and Bengio 2010: uniform, with variance 2 / (inputs + outputs) of each matrix.
    assert whole.abs().max() <= (6 / 20) ** 0.5
    assert whole.var().item() == pytest.approx(2 / 20, rel=0.1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [[3, 0, 33, 64, 0], [0, 0, 0, 0, 5], [32, 1, 1, 1, 1]])
def test_rows_computed_in_vain_change_no_bit(monkeypatch, sizes, bias):
    """In bfloat16 on a CPU products have a multiple of 32 rows."""
    draw = torch.Generator().manual_seed(1)
    count, rows = len(sizes), sum(sizes) + 2  # the last two are not computed

    def random(*shape):
        return torch.randn(shape, generator=draw).bfloat16()

    x_RI, grad_RO = random(rows, 24), random(rows, 40)
    weight_EOI, bias_EO = random(count, 40, 24), random(count, 40) if bias else None

    def products():
        return (
            linear.expert_outputs(x_RI, weight_EOI, bias_EO, sizes)[: sum(sizes)],
            linear.input_gradient(grad_RO, weight_EOI, sizes)[: sum(sizes)],
            linear.weight_gradient(grad_RO, x_RI, weight_EOI, sizes),
        )

    shapes = []
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, **how: (shapes.append(len(a)), mm(a, b, **how))[1]
    )
    actual = products()
    assert all(length % 32 == 0 for length in shapes if length != 40)
    monkeypatch.setattr(linear, "_multiple", lambda x: 1)
    for ours, expected in zip(actual, products(), strict=True):
        assert torch.equal(ours, expected)
