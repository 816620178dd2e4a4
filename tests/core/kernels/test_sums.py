"""Gradients that are added to their sums where they are computed, against autograd's own."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.kernels import sums
from megatron.kernels.sums import GradientSum, looked_up
from megatron.kernels.switches import switched
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.later_products import add_products, products_later
from megatron.parallel.linear import linear
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.mesh import SINGLE
from megatron.parallel.tensor_parallel import TensorParallel

VOCAB, WIDTH = 48, 8
add_in_gemms = pytest.fixture(lambda monkeypatch: monkeypatch.setattr(sums, "PRODUCTS_ON", {"cpu"}))


class Block(nn.Module):
    """A weight with a bias, one that is used twice, a frozen one, and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, 16), nn.Linear(16, 16, bias=False)
        self.frozen = nn.Linear(16, WIDTH, bias=False).requires_grad_(False)
        self.norm = nn.LayerNorm(16)
        self.to(dtype)

    def forward(self, x_BSI: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(linear(x_BSI, self.first.weight, self.first.bias, None))
        for _ in range(2):
            x = self.norm(x + linear(x, self.again.weight, None, None))
        return x_BSI + linear(x, self.frozen.weight, None, None)


def pair(dtype: torch.dtype = torch.float32) -> tuple[list[Block], list[Block]]:
    """Blocks whose weights have sums, and the same blocks without."""
    torch.manual_seed(1)
    ours, plain = ([Block(dtype) for _ in range(3)] for _ in range(2))
    for block, other in zip(ours, plain, strict=True):
        other.load_state_dict(block.state_dict())
        for param in block.parameters():
            if param.requires_grad and param.dim() == 2:
                GradientSum(param)
    return ours, plain


def passes(blocks, xs, forwards=None, recompute=False, ahead=1):
    """Forward and backward of micro batches, of which ``ahead`` are in memory at a time."""
    waiting = []
    for x in xs:
        x = x.clone().requires_grad_()
        y = x
        for forward in forwards or blocks:
            y = checkpoint(forward, y, use_reentrant=False) if recompute else forward(y)
        waiting.append((y.square().sum(), x))
        if len(waiting) == ahead:
            waiting.pop(0)[0].backward()
    for loss, _ in waiting:
        loss.backward()


def differing(ours, plain) -> list[str]:
    return [
        f"{number}.{name}"
        for number, (block, other) in enumerate(zip(ours, plain, strict=True))
        for (name, a), b in zip(block.named_parameters(), other.parameters(), strict=True)
        if (a.grad is None) != (b.grad is None)
        or (b.grad is not None and not torch.equal(a.grad, b.grad))
    ]


@pytest.mark.usefixtures("add_in_gemms")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_formula_has_the_bits_of_autograd(dtype, recompute):
    """With one use of each weight; autograd sums those of one pass before."""
    ours, plain = pair(dtype)
    for block in (*ours, *plain):
        block.again.requires_grad_(False)
    xs = [torch.randn(2, 5, WIDTH, dtype=dtype) for _ in range(4)]
    for blocks in (ours, plain):
        passes(blocks, xs, recompute=recompute, ahead=2)
    assert differing(ours, plain) == []
    assert ours[0].first.weight.grad is not None and ours[0].frozen.weight.grad is None


@pytest.mark.usefixtures("add_in_gemms")
def test_several_uses_in_float64():
    ours, plain = pair(torch.float64)
    xs = [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(3)]
    passes(ours, xs)
    passes(plain, xs)
    for block, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(
            block.again.weight.grad, other.again.weight.grad, rtol=1e-13, atol=1e-13
        )


class Additions(TorchDispatchMode):
    """Counts operations that write to, or return, tensors of a shape."""

    def __init__(self, shape) -> None:
        super().__init__()
        self.shape, self.counts = shape, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(result, "shape", None) == self.shape:
            self.counts[function.overloadpacket._qualified_op_name] += 1
        return result


@pytest.mark.usefixtures("add_in_gemms")
def test_compiled_backward_passes_leave_nothing_to_add(monkeypatch):
    """One graph for all blocks but the first, whose backward pass has the products as operators and
    no gradient of a weight among its results; autograd adds none."""
    ours, plain = pair()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=keep)
    forwards = [
        torch.compile(block, backend=backend, fullgraph=True, dynamic=False) for block in ours
    ]
    xs = [torch.randn(2, 5, WIDTH) for _ in range(3)]
    passes(ours, xs, forwards, ahead=2)
    passes(plain, xs)
    assert len(graphs) == 1
    assert graphs[0].code.count("megatron.add_product") == 3
    (results,) = graphs[0].graph.output_node().args
    shapes = [tuple(node.meta["val"].shape) for node in results if node is not None]
    assert (16, WIDTH) not in shapes and (16, 16) not in shapes and (16,) in shapes
    for block, other in zip(ours, plain, strict=True):
        for a, b in zip(block.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.usefixtures("add_in_gemms")
def test_a_gpu_adds_within_the_product(monkeypatch):
    """The branch of GPUs, whose one operation is addmm into the sum itself."""
    products: list[torch.Tensor] = []
    add_product = sums.add_product

    def note(total, grad_TO, x_TI, keep):
        products.append(total)
        add_product(total, grad_TO, x_TI, keep)

    monkeypatch.setattr(sums, "adds_products", lambda *_: True)
    monkeypatch.setattr(sums, "add_product", note)
    ours, plain = pair(torch.float64)
    xs = [torch.randn(2, 5, WIDTH, dtype=torch.float64) for _ in range(2)]
    passes(ours, xs[:1])
    before = ours[1].first.weight.grad
    with Additions((16, WIDTH)) as seen:
        passes(ours, xs[1:])
    assert seen.counts["aten::add_"] == 0 and seen.counts["aten::mm"] == 0
    assert sum(total is before for total in products) == 1
    assert ours[1].first.weight.grad is before
    passes(plain, xs)
    for block, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(
            block.first.weight.grad, other.first.weight.grad, rtol=1e-13, atol=1e-13
        )


@pytest.mark.usefixtures("add_in_gemms")
def test_products_that_are_left_for_later():
    ours, plain = pair()
    for block in (*ours, *plain):
        block.again.requires_grad_(False)
    xs = [torch.randn(2, 5, WIDTH) for _ in range(3)]
    for x in xs:
        left = []
        with products_later(left):
            passes(ours, [x])
        add_products(left)
    passes(plain, xs)
    assert differing(ours, plain) == []


@pytest.mark.usefixtures("add_in_gemms")
@pytest.mark.parametrize("after", [False, True])
def test_hooks_get_the_gradient_of_a_pass(after):
    """Gradients of all uses of a weight, as the noise scale measures it, and as ZeRO reduces it."""
    ours, plain = pair()
    seen: dict[int, list] = {0: [], 1: []}
    for blocks, found in ((ours, seen[0]), (plain, seen[1])):

        def note(grad, found=found):
            return None if grad is None else (found.append(grad.clone()), 2 * grad)[1]

        for weight in (blocks[1].first.weight, *([] if after else [blocks[1].again.weight])):
            weight.register_hook(note)

        def note_sum(param, found=found):
            found.append(param.grad.clone())

        if after:
            blocks[1].first.weight.register_post_accumulate_grad_hook(note_sum)
        passes(blocks, [torch.ones(1, 3, WIDTH), torch.ones(1, 4, WIDTH)])
    assert len(seen[0]) == 4
    assert sorted(x.sum() for x in seen[0]) == sorted(x.sum() for x in seen[1])
    assert torch.equal(ours[1].first.weight.grad, plain[1].first.weight.grad)


def test_a_switch_leaves_all_to_autograd(monkeypatch):
    monkeypatch.setattr(sums, "PRODUCTS_ON", {"cpu"})
    ours, _ = pair()
    monkeypatch.setattr(GradientSum, "add", None)
    with switched(sums=False):
        passes(ours, [torch.ones(1, 3, WIDTH)])
    assert ours[0].first.weight.grad is not None
    with pytest.raises(TypeError, match="not callable"):
        passes(ours, [torch.ones(1, 3, WIDTH)])


def table_losses(
    tied: bool, uses: int, dtype: torch.dtype, tokens: int, sums_on: bool, hooked=False
):
    """Gradients of a table, and of another head if it is not tied, after three micro batches; and
    what a hook saw."""
    torch.manual_seed(2)
    table, head = (nn.Parameter(torch.randn(VOCAB, WIDTH).to(dtype)) for _ in range(2))
    head = table if tied else head
    seen = []
    if sums_on:
        GradientSum(table)
        GradientSum(head)
    if hooked:
        table.register_hook(lambda grad: seen.append(grad.clone()) if grad is not None else None)
    how = LossHead(VOCAB, None, None, TensorParallel(SINGLE))
    for _ in range(3):
        ids = torch.randint(VOCAB, (2, tokens // 2))
        ids[0, :3] = 7  # a row used more than once
        lookup = looked_up if sums_on else F.embedding
        x = torch.tanh(lookup(ids, table))
        targets = Targets(ids.roll(-1, 1), torch.ones(ids.shape))
        loss = sum(linear_cross_entropy(x * n, head, targets, how) for n in range(1, uses + 1))
        loss.backward()
    return [table.grad, head.grad, *seen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("tokens", [10, 40])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_tables_have_the_bits_of_autograd(tied, uses, dtype, tokens, hooked):
    """Few rows and most of them; a head with several losses; and what hooks see."""
    ours, plain = (table_losses(tied, uses, dtype, tokens, on, hooked) for on in (True, False))
    assert len(ours) == 2 + 3 * hooked
    assert all(map(torch.equal, ours, plain))


def test_a_table_has_no_gradient_of_its_own_size(monkeypatch):
    """After the first micro batch, of an untied table; of a tied one the head's is the only one."""
    torch.manual_seed(2)
    table = nn.Parameter(torch.randn(VOCAB, WIDTH))
    GradientSum(table)
    looked_up(torch.tensor([1, 2]), table).sum().backward()
    with Additions((VOCAB, WIDTH)) as seen:
        looked_up(torch.tensor([3, 3, 5]), table).sum().backward()
    assert set(seen.counts) <= {"aten::index_add_", "aten::detach"}, seen.counts
    assert table.grad.count_nonzero(1).nonzero().flatten().tolist() == [1, 2, 3, 5]
    assert table.grad[3].tolist() == [2.0] * WIDTH
