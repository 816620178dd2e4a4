"""Tensor-parallel layers on 2 and 4 ranks, with and without sequence parallelism, against the whole
computation on one process, float64."""

import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from configs import model_config
from pool import tensor_group
from samples import sampled
from torch import Tensor, nn

from megatron.features.preference.log_probs import linear_log_probs
from megatron.model.block import Block
from megatron.model.layer_list import LayerState, initialise
from megatron.model.norm import build_norm
from megatron.parallel import cross_entropy as cross_entropy_module
from megatron.parallel import softmax_loss
from megatron.parallel.collectives import (
    start_gather_sequence,
    start_scatter_sequence,
    start_sum_over_copies,
)
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.layers import (
    ColumnParallelLinear,
    Dropout,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WholeEmbedding,
    WholeLinear,
)
from megatron.parallel.linear import LinearMap, column_linear
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.mesh import Group, build_mesh
from megatron.parallel.shard import Init, shard_of
from megatron.parallel.tensor_parallel import TensorParallel, reduce_from_ranks

SIZES = [2, 4]
BATCH, LENGTH, INPUTS, OUTPUTS, VOCAB, ROWS = 2, 8, 12, (16, 8, 8), 21, 24


def close(found: Tensor, expected: Tensor) -> bool:
    assert found.shape == expected.shape
    return bool((found - expected).abs().max() <= 1e-12 * expected.abs().max())


def prepare(module: nn.Module, group: Group) -> nn.Module:
    """The module in float64 with all values random, biases too, equal for every layout."""
    module = module.double()
    for name, param in module.named_parameters():
        param.init = Init(std=0.5)
        initialise(shard_of(param).whole or name, param, 1, {"tensor": (group.rank, group.size)})
    return module


def on_all(x: Tensor, group: Group) -> list[Tensor]:
    """What each rank has."""
    found = [torch.empty_like(x).contiguous() for _ in range(group.size)]
    dist.all_gather(found, x.contiguous(), group=group.handle)
    return found


def whole(params: Iterable[nn.Parameter], group: Group) -> tuple[Tensor, Tensor]:
    """Values and gradient of a parameter that is held in these, from the copies that count; all
    other copies must be the same."""
    joined = []
    for part in ("data", "grad"):
        full = None
        for param in params:
            shard, found = shard_of(param), on_all(getattr(param, part), group)
            full = found[0].new_full(shard.canonical_shape, torch.nan) if full is None else full
            for rank, share in enumerate(found):
                place = {"tensor": (rank, group.size)}
                if shard.counted(place):
                    shard.place(full, share, place)
                    first = share
                else:
                    assert torch.equal(share, first)
        joined.append(full)
    return joined[0], joined[1]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def outside(x_whole: Tensor, tp: TensorParallel) -> Tensor:
    """What this rank holds of activations between the layers, as a leaf."""
    return tp.own(x_whole, 1).clone().requires_grad_()


def gathered(x: Tensor, tp: TensorParallel) -> Tensor:
    """The whole of activations between the layers, which must be equal where they overlap."""
    found = on_all(x.detach(), tp.group)
    if tp.split:
        return torch.cat(found, dim=1)
    assert all(torch.equal(each, found[0]) for each in found)
    return found[0]


def check(expected: Tensor, inputs: list[Tensor], grad: Tensor, found: list[Tensor]) -> None:
    """Compares output and gradients with those of the whole computation."""
    gradients = torch.autograd.grad(expected, inputs, grad)
    for ours, theirs in zip(found, [expected, *gradients], strict=True):
        assert close(ours, theirs)


def column(sequence: bool) -> None:
    tp = TensorParallel(tensor_group(), sequence)
    group = tp.group
    made = ColumnParallelLinear(INPUTS, OUTPUTS, bias=True, init=Init(0.5), tp=tp)
    layer = prepare(made, group)
    x_whole, grad = draw(BATCH, LENGTH, INPUTS), draw(BATCH, LENGTH, sum(OUTPUTS), seed=1)
    x, share = outside(x_whole, tp), shard_of(layer.bias)
    y = layer(x)
    of_rows = [share.cut(row, tp.coordinates) for row in grad.flatten(0, 1)]
    y.backward(torch.stack(of_rows).view_as(y))
    weight, weight_grad = whole([layer.weight], group)
    bias, bias_grad = whole([layer.bias], group)
    pieces = [each.flatten(0, 1) for each in on_all(y.detach(), group)]
    sizes = {"tensor": group.size}
    rows = [share.join([piece[row] for piece in pieces], sizes) for row in range(BATCH * LENGTH)]
    inputs = [t.requires_grad_() for t in (x_whole, weight, bias)]
    y_whole = torch.stack(rows).view_as(grad)
    found = [y_whole, gathered(x.grad, tp), weight_grad, bias_grad]
    check(F.linear(*inputs), inputs, grad, found)


def heads(sequence: bool) -> None:
    """Queries, keys and values with more, as many and fewer key and value heads than ranks."""
    tp = TensorParallel(tensor_group(), sequence)
    for kv_heads in (1, 2, 4, 8):
        for bias in (False, True):
            _heads(tp, kv_heads, bias)


def _heads(tp: TensorParallel, kv_heads: int, bias: bool) -> None:
    group, width, query_heads = tp.group, 3, 8
    made = QKVParallelLinear(INPUTS, query_heads, kv_heads, width, bias=bias, init=Init(0.5), tp=tp)
    layer = prepare(made, group)
    x_whole = draw(BATCH, LENGTH, INPUTS)
    grads = [draw(BATCH, LENGTH, query_heads, width, seed=seed) for seed in (1, 2, 3)]
    x, mine = outside(x_whole, tp), query_heads // group.size
    first = group.rank * mine
    seen = [head * kv_heads // query_heads for head in range(first, first + mine)]
    local = sorted(set(seen))
    # Every query head has a gradient of its own for the key and value that it attends to.
    found = [y.unflatten(-1, (-1, width)) for y in layer(x)]
    assert [y.shape[2] for y in found] == [mine, len(local), len(local)]
    places = [local.index(head) for head in seen]
    found = [found[0], found[1][:, :, places], found[2][:, :, places]]
    own = [grad[:, :, first : first + mine] for grad in grads]
    torch.autograd.backward(found, own)
    weight, weight_grad = whole(
        [w for w in (layer.weight, layer.kv_weight) if w is not None], group
    )
    inputs, gradients = [x_whole, weight], [gathered(x.grad, tp), weight_grad]
    if bias:
        vector, vector_grad = whole(
            [b for b in (layer.bias, layer.kv_bias) if b is not None], group
        )
        inputs, gradients = [*inputs, vector], [*gradients, vector_grad]
    inputs = [t.requires_grad_() for t in inputs]
    q, k, v = F.linear(*inputs).split(list(shard_of(layer.weight).cuts[0].parts), dim=-1)
    q = q.unflatten(-1, (-1, width))
    k, v = (
        y.unflatten(-1, (-1, width)).repeat_interleave(query_heads // kv_heads, dim=2)
        for y in (k, v)
    )
    y_whole = torch.cat([torch.cat(on_all(y.detach(), group), dim=2) for y in found], dim=2)
    check(torch.cat([q, k, v], 2), inputs, torch.cat(grads, 2), [y_whole, *gradients])


def row(sequence: bool) -> None:
    tp = TensorParallel(tensor_group(), sequence)
    group = tp.group
    made = RowParallelLinear(INPUTS, 10, bias=True, init=Init(0.5), tp=tp)
    layer = prepare(made, group)
    x_whole, grad = draw(BATCH, LENGTH, INPUTS), draw(BATCH, LENGTH, 10, seed=1)
    x = x_whole.chunk(group.size, -1)[group.rank].clone().requires_grad_()
    y = layer(x)
    y.backward(tp.own(grad, 1))
    weight, weight_grad = whole([layer.weight], group)
    bias, bias_grad = whole([layer.bias], group)
    inputs = [t.requires_grad_() for t in (x_whole, weight, bias)]
    x_grad = torch.cat(on_all(x.grad, group), -1)
    check(F.linear(*inputs), inputs, grad, [gathered(y, tp), x_grad, weight_grad, bias_grad])


def embedding(sequence: bool) -> None:
    """Lookup and projection by one table, whose gradient is the sum of both."""
    tp = TensorParallel(tensor_group(), sequence)
    group = tp.group
    head = LossHead(VOCAB, None, 0, tp)
    made = VocabParallelEmbedding(ROWS, INPUTS, init=Init(0.5), head=head)
    table = prepare(made, group)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    x_whole = draw(BATCH, LENGTH, INPUTS)
    grads = draw(BATCH, LENGTH, INPUTS, seed=2), draw(BATCH, LENGTH, ROWS, seed=1)
    x = outside(x_whole, tp)
    found, logits = table(ids), table(x, project=True)
    own = tp.own(grads[0], 1), grads[1].chunk(group.size, -1)[group.rank]
    torch.autograd.backward([found, logits], own)
    weight, weight_grad = whole([table.weight], group)
    reference = torch.cat([weight, weight.new_zeros(ROWS - VOCAB, INPUTS)]).requires_grad_()
    x_whole.requires_grad_()
    found_whole, logits_whole = F.embedding(ids, reference), F.linear(x_whole, reference)
    torch.autograd.backward([found_whole, logits_whole], grads)
    assert torch.equal(gathered(found, tp), found_whole)
    assert close(torch.cat(on_all(logits.detach(), group), -1), logits_whole)
    assert close(weight_grad, reference.grad[:VOCAB])
    assert close(gathered(x.grad, tp), x_whole.grad)


def positions(sequence: bool) -> None:
    """Positions of one sequence for all, and of each."""
    tp = TensorParallel(tensor_group(), sequence)
    table = prepare(WholeEmbedding(LENGTH, 4, init=Init(0.5), tp=tp), tp.group)
    each = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) % 3])
    for ids in (torch.arange(LENGTH), each):
        table.zero_grad()
        grad = draw(*ids.shape, 4)
        found = table(ids)
        found.backward(tp.own(grad, -2))
        weight, weight_grad = whole([table.weight], tp.group)
        expected = F.embedding(ids, weight.requires_grad_())
        if ids.dim() == 2:
            assert torch.equal(gathered(found, tp), expected)
        (expected_grad,) = torch.autograd.grad(expected, weight, grad)
        assert close(weight_grad, expected_grad)


def norm(sequence: bool) -> None:
    tp = TensorParallel(tensor_group(), sequence)
    for name in ("LayerNorm", "RMSNorm"):
        _norm(tp, name)


def _norm(tp: TensorParallel, name: str) -> None:
    config = model_config(hidden_size=INPUTS, normalization=name)
    layer = prepare(build_norm(config, tp), tp.group)
    x_whole, grad = draw(BATCH, LENGTH, INPUTS), draw(BATCH, LENGTH, INPUTS, seed=1)
    x = outside(x_whole, tp)
    y = layer(x)
    y.backward(tp.own(grad, 1))
    params = [whole([param], tp.group) for param in layer.parameters()]
    inputs = [t.requires_grad_() for t in (x_whole, *(values for values, _ in params))]
    whole_norm = {"LayerNorm": F.layer_norm, "RMSNorm": F.rms_norm}[name]
    expected = whole_norm(inputs[0], (INPUTS,), *inputs[1:], eps=config.norm.norm_epsilon)
    found = [gathered(y, tp), gathered(x.grad, tp), *(grad for _, grad in params)]
    check(expected, inputs, grad, found)


def scores(sequence: bool) -> None:
    """Scores of all tokens on every rank, each of which computes the same loss of them."""
    tp = TensorParallel(tensor_group(), sequence)
    layer = prepare(WholeLinear(INPUTS, 2, bias=True, init=Init(0.5), tp=tp), tp.group)
    x_whole, grad = draw(BATCH, LENGTH, INPUTS), draw(BATCH, LENGTH, 2, seed=1)
    x = outside(x_whole, tp)
    y = tp.whole_sequence(layer(x))
    y.backward(grad)
    params = [whole([param], tp.group) for param in layer.parameters()]
    inputs = [t.requires_grad_() for t in (x_whole, *(values for values, _ in params))]
    ours = [y.detach(), gathered(x.grad, tp), *(grad for _, grad in params)]
    check(F.linear(*inputs), inputs, grad, ours)


def dropout(sequence: bool) -> None:
    """Ranks draw the same where they hold the same, and differently for their own slices."""
    tp = TensorParallel(tensor_group(), sequence)
    layer = Dropout(0.5, tp)
    torch.manual_seed(7)
    found = on_all(layer(torch.ones(2, 50)), tp.group)
    after = on_all(torch.rand(3), tp.group)
    assert torch.equal(found[0], found[1]) is not sequence
    assert all(torch.equal(each, after[0]) for each in after)
    before = torch.get_rng_state()
    assert (layer.eval()(torch.ones(3)) == 1).all() and (Dropout(0.0, tp)(after[0]) < 1).all()
    assert torch.equal(torch.get_rng_state(), before)


def kept_bytes(sequence: bool) -> tuple[int, int]:
    """Bytes that a column layer keeps for its backward pass next to its parameters, and those of
    the input that this rank holds."""
    tp = TensorParallel(tensor_group(), sequence)
    layer = ColumnParallelLinear(INPUTS, OUTPUTS, bias=True, init=Init(0.5), tp=tp)
    x = tp.own(torch.randn(BATCH, LENGTH, INPUTS), 1).clone().requires_grad_()
    return _kept(lambda: layer(x), layer), x.nbytes


def _kept(forward, module: nn.Module) -> int:
    storages = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    for param in module.parameters():
        storages.pop(param.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def block_bytes(sequence: bool) -> int:
    """Bytes that a block keeps for its backward pass."""
    tp = TensorParallel(tensor_group(), sequence)
    config = model_config(
        num_layers=1, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, kv_channels=8,
        num_query_groups=8, max_position_embeddings=32, hidden_dropout=0.1, attention_dropout=0.0,
    )  # fmt: skip
    block = Block(config, 0, tp, recompute_attention=False)
    x = tp.own(torch.randn(2, 32, 64), 1).clone().requires_grad_()
    return _kept(lambda: block(LayerState(x)), block)


def low_precision(dtype: torch.dtype, autocast: bool) -> None:
    """An MLP in half precision, by autocast or throughout, loosely as in float64."""
    group = tensor_group()
    for sequence in (False, True):
        _low_precision(TensorParallel(group, sequence), dtype, autocast)


def _low_precision(tp: TensorParallel, dtype: torch.dtype, autocast: bool) -> None:
    up = ColumnParallelLinear(INPUTS, (16,), bias=True, init=Init(0.5), tp=tp)
    down = RowParallelLinear(16, INPUTS, bias=True, init=Init(0.5), tp=tp)
    exact = prepare(nn.Sequential(up, nn.GELU(), down), tp.group)
    x_whole, grad = draw(BATCH, LENGTH, INPUTS), draw(BATCH, LENGTH, INPUTS, seed=1)
    results = []
    for kind in (torch.float64, torch.float32 if autocast else dtype):
        model = exact.to(kind)
        model.zero_grad()
        x = outside(x_whole, tp).detach().to(kind).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast and kind == torch.float32):
            y = model(x)
        y.backward(tp.own(grad, 1).to(y.dtype))
        found = [x.grad, *(param.grad for param in model.parameters())]
        assert all(each.dtype == kind for each in found)
        results.append([y.detach().double(), *(each.double() for each in found)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= 0.02 * expected.norm()
        assert not torch.equal(found, expected)


def cross_entropy(vocab: int, sequence: bool, softcap: float | None) -> None:
    """As CPUs compute it, and what GPUs compile; and the log-probabilities of its targets."""
    tp = TensorParallel(tensor_group(), sequence)
    _cross_entropy(vocab, tp, softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy_module, "compiles_for", lambda kind: True)
        patch.setattr(cross_entropy_module, "eager_loss", None)
        patch.setattr(softmax_loss, "compiled", lambda function: function)
        _cross_entropy(vocab, tp, softcap)


def _cross_entropy(vocab: int, tp: TensorParallel, softcap: float | None) -> None:
    """ROWS rows, of which the last ranks hold only padding when ``vocab`` is small; chunks of three
    tokens."""
    group, width = tp.group, ROWS // tp.group.size
    weight = draw(ROWS, INPUTS)
    mine = weight.chunk(group.size)[group.rank].clone().requires_grad_()
    x_whole = draw(BATCH, LENGTH, INPUTS) * 2
    labels = torch.randint(vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = (draw(BATCH, LENGTH, seed=1) > -1).double()
    x = outside(x_whole, tp)
    head = LossHead(vocab, softcap, 3 * 8 * min(vocab, width), tp)
    loss = linear_cross_entropy(x, mine, Targets(labels, mask), head)
    (7 * loss).backward()
    reference = [weight.requires_grad_(), x_whole.requires_grad_()]
    logits = F.linear(x_whole, weight[:vocab])
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    flat = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = (flat.view_as(mask) * mask).sum() / mask.sum()
    weight_grad, x_grad = torch.autograd.grad(7 * expected, reference, retain_graph=True)
    assert close(loss.detach(), expected.detach())
    assert close(torch.cat(on_all(mine.grad, group)), weight_grad)
    assert close(gathered(x.grad, tp), x_grad)
    x.grad = mine.grad = None
    scores, wanted = (
        linear_log_probs(x, mine, Targets(labels, mask), head),
        draw(*mask.shape, seed=2),
    )
    scores.backward(wanted)
    each = -flat.view_as(mask) * mask
    weight_grad, x_grad = torch.autograd.grad(each, reference, wanted)
    assert close(scores.detach(), each.detach())
    assert close(torch.cat(on_all(mine.grad, group)), weight_grad)
    assert close(gathered(x.grad, tp), x_grad)


def collectives() -> None:
    group = tensor_group()
    x = torch.ones(2, 3, requires_grad=True) * float(group.rank + 1)
    x.retain_grad()
    y = reduce_from_ranks(x * 1, group)
    y.backward(torch.full((2, 3), 5.0))
    assert (y == sum(range(1, group.size + 1))).all() and (x.grad == 5).all()
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype, batch in itertools.product(dtypes, (1, 3)):
        whole = torch.arange(batch * 8 * 3).view(batch, 8, 3).to(dtype)
        mine = whole.chunk(group.size, 1)[group.rank]
        # The slice is not contiguous when there is more than one sample.
        assert torch.equal(start_gather_sequence(mine, group)(), whole)
        assert torch.equal(start_scatter_sequence(whole, group)(), mine * group.size)
    for copies in (1, 2, group.size):
        neighbours = range(group.rank // copies * copies, group.rank // copies * copies + copies)
        total = start_sum_over_copies(torch.full((3,), float(group.rank)), copies, group)()
        assert total.tolist() == [sum(neighbours)] * 3


def frozen() -> None:
    """Gradients that nothing needs are neither computed nor waited for."""
    tp = TensorParallel(tensor_group(), sequence=True)
    x = torch.randn(1, 2, INPUTS, requires_grad=True)
    weight, bias = torch.randn(4, INPUTS, requires_grad=True), torch.randn(4)
    for leaf, other in ((x, weight), (weight, x)):
        leaf.grad = other.grad = None
        leaf.requires_grad_(True), other.requires_grad_(False)
        for copies in (1, tp.group.size):
            (y,) = column_linear(x, (LinearMap(weight, bias, copies),), tp)
            y.sum().backward()
        assert leaf.grad is not None and other.grad is None


def groups() -> dict[str, tuple[int, ...]]:
    dist.init_process_group("gloo")
    made = build_mesh({"tensor": 2})
    for group in (made.tensor, made.dense, made.pipeline, made.model):
        assert group.ranks[group.rank] == dist.get_rank()
        total = torch.ones(())
        dist.all_reduce(total, group=group.handle)
        assert total == group.size
    return {name: getattr(made, name).ranks for name in ("tensor", "dense", "pipeline", "model")}


def staged_groups() -> dict[str, tuple[int, ...]]:
    dist.init_process_group("gloo")
    made = build_mesh({"pipeline": 2, "tensor": 2})
    return {name: getattr(made, name).ranks for name in ("tensor", "dense", "pipeline", "model")}


def shared_groups() -> tuple[int, set[str]]:
    """How many groups of torch's a rank has, and the names of those that are the world's."""
    dist.init_process_group("gloo")
    made = build_mesh({})
    names = ("world", "tensor", "dense", "pipeline", "model")
    handles = {name: getattr(made, name).handle for name in names}
    of_world = {name for name, handle in handles.items() if handle is dist.group.WORLD}
    return len(set(map(id, handles.values()))), of_world


LAYERS = [column, heads, row, embedding, positions, norm, scores, dropout]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_against_one_process(pool, layer, sequence, size):
    pool.run(size, layer, sequence)


def test_groups_of_the_same_ranks_are_one(pool):
    assert pool.run(2, shared_groups) == [(2, {"world", "dense"})] * 2


@pytest.mark.parametrize("size", SIZES)
def test_collectives(pool, size):
    pool.run(size, collectives)


def test_gradients_that_nothing_needs(pool):
    pool.run(2, frozen)


@pytest.mark.parametrize("size", sampled([1, 2, 4], lambda size: size == 2))
def test_a_column_layer_keeps_its_slice_only(pool, size):
    whole_bytes = 4 * BATCH * LENGTH * INPUTS
    assert pool.run(size, kept_bytes, False) == [(whole_bytes, whole_bytes)] * size
    assert pool.run(size, kept_bytes, True) == [(whole_bytes // size,) * 2] * size


def test_a_block_keeps_one_part_in_as_many_as_there_are_ranks(pool):
    (alone,) = pool.run(1, block_bytes, True)
    for size in SIZES:
        for kept in pool.run(size, block_bytes, True):
            assert alone / size <= kept < 1.02 * alone / size
        assert min(pool.run(size, block_bytes, False)) > 1.3 * alone / size


@pytest.mark.parametrize(
    "dtype, autocast",
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
    ids=["bf16", "bf16-autocast", "fp16"],
)
def test_low_precision_against_float64(pool, dtype, autocast):
    pool.run(2, low_precision, dtype, autocast)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", sampled([24, 21, 5], lambda size: size == 21))
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_against_torch_cross_entropy(pool, size, vocab, sequence):
    pool.run(size, cross_entropy, vocab, sequence, 2.0 if vocab == 21 else None)


def test_tensor_ranks_count_fastest(pool):
    ranks = pool.run(4, groups)
    assert [r["tensor"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [r["dense"] for r in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r["pipeline"] for r in ranks] == [(0,), (1,), (2,), (3,)]
    assert [r["model"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_pipeline_ranks_count_slowest(pool):
    ranks = pool.run(4, staged_groups)
    assert [r["tensor"] for r in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [r["pipeline"] for r in ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [r["model"] for r in ranks] == [(0, 1, 2, 3)] * 4
