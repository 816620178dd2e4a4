"""Tensor-parallel layers on 2 and 4 ranks against the whole computation on one process, float64."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import tensor_group
from torch import Tensor, nn

from megatron.model.layer_list import initialise
from megatron.parallel.collectives import copy_to_ranks, gather_last_dim, reduce_from_ranks
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.groups import Group, build_groups
from megatron.parallel.layers import (
    ColumnParallelLinear,
    ReplicatedEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.parallel.shard import Init, shard_of

SIZES = [2, 4]
INPUTS, OUTPUTS, VOCAB, ROWS = 12, (16, 8, 8), 21, 24


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-12 * expected.abs().max())


def prepare(module: nn.Module, group: Group) -> nn.Module:
    """The module in float64 with all values random, biases too, equal for every layout."""
    module = module.double()
    for name, param in module.named_parameters():
        param.init = Init(std=0.5)
        initialise(name, param, 1, group.rank, group.size)
    return module


def whole(param: nn.Parameter, group: Group) -> tuple[Tensor, Tensor]:
    """Values and gradient of a parameter, joined from all ranks."""
    joined = []
    for part in (param.detach(), param.grad):
        shares = [torch.empty_like(part) for _ in range(group.size)]
        dist.all_gather(shares, part, group=group.handle)
        joined.append(shard_of(param).join(shares))
    return joined[0], joined[1]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def column() -> None:
    group = tensor_group()
    layer = prepare(
        ColumnParallelLinear(INPUTS, OUTPUTS, bias=True, init=Init(0.5), group=group), group
    )
    x, grad_whole = draw(2, 3, INPUTS).requires_grad_(), draw(2, 3, sum(OUTPUTS), seed=1)
    y = layer(x)
    share = shard_of(layer.bias)
    y.backward(torch.stack([share.cut(g, group.rank, group.size) for g in grad_whole.view(6, -1)])
               .view_as(y))  # fmt: skip
    weight, weight_grad = whole(layer.weight, group)
    bias, bias_grad = whole(layer.bias, group)
    reference = [draw(2, 3, INPUTS), weight, bias]
    y_whole = F.linear(*(t.requires_grad_() for t in reference))
    y_whole.backward(grad_whole)
    pieces = [torch.empty_like(y) for _ in range(group.size)]
    dist.all_gather(pieces, y.detach())
    rows = [share.join([piece.view(6, -1)[row] for piece in pieces]) for row in range(6)]
    assert close(torch.stack(rows), y_whole.detach().view(6, -1))
    for found, expected in zip((x.grad, weight_grad, bias_grad), reference, strict=True):
        assert close(found, expected.grad)


def row() -> None:
    group = tensor_group()
    layer = prepare(RowParallelLinear(INPUTS, 10, bias=True, init=Init(0.5), group=group), group)
    x_whole, grad = draw(2, 3, INPUTS), draw(2, 3, 10, seed=1)
    width = INPUTS // group.size
    x = x_whole[..., group.rank * width : (group.rank + 1) * width].clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    weight, weight_grad = whole(layer.weight, group)
    bias, bias_grad = whole(layer.bias, group)
    reference = [x_whole, weight, bias]
    y_whole = F.linear(*(t.requires_grad_() for t in reference))
    y_whole.backward(grad)
    assert close(y, y_whole)
    assert close(gather_last_dim(x.grad, group), x_whole.grad)
    assert close(weight_grad, weight.grad) and close(bias_grad, bias.grad)


def embedding() -> None:
    """Lookup and projection by one table, whose gradient is the sum of both."""
    group = tensor_group()
    table = prepare(VocabParallelEmbedding(ROWS, VOCAB, INPUTS, init=Init(0.5), group=group), group)
    ids = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    x, grad = draw(2, 5, INPUTS).requires_grad_(), draw(2, 5, ROWS, seed=1)
    found = table(ids)
    logits = table(x, project=True)
    width = ROWS // group.size
    mine = slice(group.rank * width, (group.rank + 1) * width)
    assert logits.shape == (2, 5, width)
    found.backward(draw(2, 5, INPUTS, seed=2))
    logits.backward(grad[..., mine])
    weight, weight_grad = whole(table.weight, group)
    padding = weight.new_zeros(ROWS - VOCAB, INPUTS)
    reference = torch.cat([weight, padding]).requires_grad_()
    x_whole = draw(2, 5, INPUTS).requires_grad_()
    found_whole, logits_whole = F.embedding(ids, reference), F.linear(x_whole, reference)
    found_whole.backward(draw(2, 5, INPUTS, seed=2))
    logits_whole.backward(grad)
    assert torch.equal(found, found_whole)
    assert close(gather_last_dim(logits.detach(), group), logits_whole)
    assert close(weight_grad, reference.grad[:VOCAB]) and close(x.grad, x_whole.grad)


def replicated_embedding() -> None:
    group = tensor_group()
    table = prepare(ReplicatedEmbedding(6, 4, init=Init(0.5)), group)
    values = [torch.empty_like(table.weight) for _ in range(group.size)]
    dist.all_gather(values, table.weight.detach())
    assert all(torch.equal(value, values[0]) for value in values)


def cross_entropy(vocab: int) -> None:
    """ROWS columns, of which the last ranks hold only padding when ``vocab`` is small."""
    group = tensor_group()
    logits, weights = draw(2, 5, ROWS) * 3, draw(2, 5, seed=1)
    labels = torch.randint(vocab, (2, 5), generator=torch.Generator().manual_seed(3))
    width = ROWS // group.size
    mine = logits[..., group.rank * width : (group.rank + 1) * width].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine * 1, labels, vocab, group)
    (loss * weights).sum().backward()
    reference = logits.requires_grad_()
    flat = F.cross_entropy(reference[..., :vocab].flatten(0, 1), labels.flatten(), reduction="none")
    (flat.view_as(loss) * weights).sum().backward()
    assert close(loss, flat.view_as(loss))
    grad = gather_last_dim(mine.grad, group)
    assert close(grad, reference.grad)
    assert torch.count_nonzero(grad[..., vocab:]) == 0


def shared_gradient() -> None:
    """The sum over ranks in the backward pass must not reach a gradient that others use too."""
    group = tensor_group()
    x, other = draw(3).requires_grad_(), draw(3).requires_grad_()
    # A sum hands the same gradient tensor to both of its terms, here in either order.
    for y in (copy_to_ranks(x, group) + other, other + copy_to_ranks(x, group)):
        x.grad = other.grad = None
        given = torch.ones(3, dtype=torch.float64)
        y.backward(given)
        assert x.grad.tolist() == [group.size] * 3
        assert other.grad.tolist() == given.tolist() == [1.0] * 3


def collectives() -> None:
    group = tensor_group()
    x = torch.full((2, 3), float(group.rank + 1), requires_grad=True)
    y = reduce_from_ranks(x.t(), group)
    y.backward(torch.full((3, 2), 5.0))
    assert (y == sum(range(1, group.size + 1))).all() and (x.grad == 5).all()
    assert (x.detach() == group.rank + 1).all()
    turned = torch.full((3, 2), float(group.rank)).t()
    expected = [float(rank) for rank in range(group.size) for _ in range(3)]
    assert gather_last_dim(turned, group)[0].tolist() == expected


def groups() -> dict[str, tuple[int, ...]]:
    dist.init_process_group("gloo")
    made = build_groups(2, 1)
    for group in (made.tensor, made.data, made.pipeline, made.model):
        assert group.ranks[group.rank] == dist.get_rank()
        total = torch.ones(())
        dist.all_reduce(total, group=group.handle)
        assert total == group.size
    return {name: getattr(made, name).ranks for name in ("tensor", "data", "pipeline", "model")}


def staged_groups() -> dict[str, tuple[int, ...]]:
    dist.init_process_group("gloo")
    made = build_groups(2, 2)
    return {name: getattr(made, name).ranks for name in ("tensor", "data", "pipeline", "model")}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "job",
    [column, row, embedding, replicated_embedding, shared_gradient, collectives],
    ids=lambda job: job.__name__,
)
def test_against_one_process(pool, size, job):
    pool.run(size, job)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", [24, 21, 5])
def test_against_torch_cross_entropy(pool, size, vocab):
    pool.run(size, cross_entropy, vocab)


def test_tensor_ranks_count_fastest(pool):
    ranks = pool.run(4, groups)
    assert [r["tensor"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [r["data"] for r in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r["pipeline"] for r in ranks] == [(0,), (1,), (2,), (3,)]
    assert [r["model"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_pipeline_ranks_count_slowest(pool):
    ranks = pool.run(4, staged_groups)
    assert [r["tensor"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [r["pipeline"] for r in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r["model"] for r in ranks] == [(0, 1, 2, 3)] * 4
