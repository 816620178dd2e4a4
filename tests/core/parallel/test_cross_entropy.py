"""The loss of a head on one rank; tests/distributed/parallel has it on several."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lowering import compiled_traffic
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.kernels import sums
from megatron.kernels.compiler import missing_compiler
from megatron.parallel import cross_entropy, softmax_loss
from megatron.parallel.cross_entropy import linear_cross_entropy, logits_chunk
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.mesh import SINGLE
from megatron.parallel.tensor_parallel import TensorParallel

WAYS = ["eager", "definition"]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
ROWS, WIDTH, VOCAB, PADDED = 7, 12, 33, 40
CHUNK = 4 * VOCAB  # bytes of a token's float32 logits


def case(dtype, samples=2, rows=ROWS):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, rows, WIDTH, generator=draw, dtype=torch.float64)
    weight = torch.randn(PADDED, WIDTH, generator=draw, dtype=torch.float64)
    labels = torch.randint(VOCAB, (samples, rows), generator=draw)
    mask = (torch.rand(samples, rows, generator=draw) < 0.7).float()
    return x.to(dtype), weight.to(dtype), labels, mask


def head(chunk_bytes=0, softcap=None):
    return LossHead(VOCAB, softcap, chunk_bytes, TensorParallel())


def ours(x, weight, labels, mask, how=None, factor=1.0):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, Targets(labels, mask), how or head())
    (loss * factor).backward()
    return loss.detach(), x.grad, weight.grad


def torchs(x, weight, labels, mask, softcap=None, factor=1.0):
    """In float64, from the same numbers."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = F.linear(x, weight[:VOCAB])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (loss * mask.flatten()).sum() / mask.sum()
    (loss * factor).backward()
    return loss.detach(), x.grad, weight.grad


def differences(found, expected):
    return [
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, expected, strict=True)
    ]


@pytest.fixture
def way(request, monkeypatch) -> str:
    """How the loss of a chunk is computed: "eager", as on CPUs; "compiled", as on GPUs; and
    "definition", which is what is compiled, without the compiler's part."""
    if request.param != "eager":
        monkeypatch.setattr(cross_entropy, "compiles_for", lambda kind: True)
        monkeypatch.setattr(cross_entropy, "eager_loss", None)
    if request.param == "definition":
        monkeypatch.setattr(softmax_loss, "compiled", lambda function: function)
    if request.param == "compiled" and missing_compiler("cpu"):
        pytest.skip(missing_compiler("cpu"))
    return request.param


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_bytes", [0, 3 * CHUNK])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_torch_cross_entropy(way, dtype, chunk_bytes, softcap):
    arguments = case(dtype)
    found = ours(*arguments, head(chunk_bytes, softcap))
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert found[1].dtype == found[2].dtype == dtype
    assert max(differences(found, torchs(*arguments, softcap))) <= TOLERANCE[dtype]
    assert torch.count_nonzero(found[2][VOCAB:]) == 0


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("chunk_bytes", [0, 3 * CHUNK])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_bias_of_the_logits(way, dtype, chunk_bytes):
    """As another column of the weight, whose input is 1."""
    x, weight, labels, mask = case(dtype)
    bias = torch.randn(PADDED, generator=torch.Generator().manual_seed(1)).to(dtype)
    parameters = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    inputs, weights, biases = parameters
    how = head(chunk_bytes, 2.0)
    loss = linear_cross_entropy(inputs, weights, Targets(labels, mask), how, biases)
    (3.0 * loss).backward()
    expected, of_x, of_weight = torchs(
        F.pad(x, (0, 1), value=1.0), torch.cat([weight, bias[:, None]], 1), labels, mask, 2.0, 3.0
    )
    found = [loss.detach(), *(tensor.grad for tensor in parameters)]
    exact = [expected, of_x[..., :-1], of_weight[:, :-1], of_weight[:, -1]]
    assert max(differences(found, exact)) <= TOLERANCE[dtype]
    assert all(tensor.grad.dtype == dtype for tensor in parameters)
    assert not weights.grad[VOCAB:].any() and not biases.grad[VOCAB:].any()
    alone = linear_cross_entropy(x, weight, Targets(labels, mask), how, biases)
    (of_bias,) = torch.autograd.grad(3.0 * alone, biases)
    assert of_bias.equal(biases.grad)


@pytest.mark.parametrize("way", ["compiled"], indirect=True)
@pytest.mark.parametrize("tokens", [7, pytest.param(3, marks=pytest.mark.proof)])
def test_generated_code_against_torch_cross_entropy(monkeypatch, way, tokens):
    """Two chunks of the same size; else the last is the first not compiled for its size alone."""
    arguments = case(torch.bfloat16)
    found = ours(*arguments, head(2 * PADDED * tokens, 2.0))
    assert max(differences(found, torchs(*arguments, 2.0))) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 3), ("meta", 1)])
def test_a_gpu_takes_larger_chunks_by_default(device, chunks):
    """64 KiB of float32 logits a token: 1,024 tokens are 64 MiB. The meta device is no CPU."""
    x = torch.empty(3000, 1, device=device)
    labels = torch.zeros(1, 3000, dtype=torch.int64, device=device)
    how = LossHead(2**14, None, None, TensorParallel())
    weight = torch.empty(2**14, 1, device=device)
    run = cross_entropy.LogitChunks(x, weight, None, Targets(labels, torch.ones_like(labels)), how)
    assert len(run.chunks) == chunks


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 13, 14, 15])
@pytest.mark.parametrize("work_rows", [1, 4, 100])
def test_chunks_change_nothing(monkeypatch, tokens, work_rows):
    arguments = case(torch.float64)
    expected = ours(*arguments)
    monkeypatch.setattr(sums, "WORK_BYTES", work_rows * CHUNK)
    found = ours(*arguments, head(2 * CHUNK * tokens))
    assert max(differences(found, expected)) <= 1e-14


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1 / 3, 1 / 60, 7.0, 2.0**14])
def test_nothing_is_scaled_as_a_whole(way, dtype, factor):
    """Accumulation divides the loss, fp16 multiplies it, a mask leaves tokens out: of rounding the
    projection on the exact gradient must know nothing."""
    arguments = case(dtype, samples=16, rows=64)
    assert 600 < arguments[3].sum() < 1000, "no power of two"
    found = ours(*arguments, head(300 * CHUNK), factor=factor)
    expected = torchs(*arguments, factor=factor)
    for mine, exact in zip(found[1:], expected[1:], strict=True):
        along = float((mine.double() * exact).sum() / exact.square().sum())
        assert along == pytest.approx(1.0, abs=1.2e-3 if dtype != torch.float32 else 1e-6)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_few_tokens_that_count_do_not_overflow_float16(way):
    """Whatever the loss scale, which comes after."""
    x, weight, labels, mask = case(torch.float16, samples=64, rows=128)
    mask.zero_()[5, 7] = 1.0
    found = ours(x * 10, weight * 1e-2, labels, mask, factor=1.0)
    expected = torchs(x * 10, weight * 1e-2, labels, mask)
    assert max(differences(found, expected)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_small_gradients_are_not_lost_in_float16(way):
    """A token of many has a gradient below what float16 can hold; the loss scale comes after."""
    x, weight, labels, _ = case(torch.float16, samples=64, rows=64)
    arguments = x, weight * 1e-3, labels, torch.ones(64, 64)
    found = ours(*arguments, head(64 * CHUNK), factor=2.0**14)
    expected = torchs(*arguments, factor=2.0**14)
    assert max(differences(found, expected)) <= TOLERANCE[torch.float16]


def test_labels_that_are_no_token_have_no_logit(monkeypatch):
    """Padding of the vocabulary, and negative numbers."""
    x, weight, labels, mask = case(torch.float64)
    labels[0, :3], mask[:] = torch.tensor([VOCAB, PADDED - 1, -100]), 1.0
    expected = ours(x, weight, labels, mask)
    monkeypatch.setattr(cross_entropy, "compiles_for", lambda kind: True)
    monkeypatch.setattr(softmax_loss, "compiled", lambda function: function)
    assert max(differences(ours(x, weight, labels, mask), expected)) <= 1e-13


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_no_token_counts(way):
    x, weight, labels, mask = case(torch.float32)
    loss, *gradients = ours(x, weight, labels, torch.zeros_like(mask))
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_large_logits_do_not_overflow(way):
    x = torch.tensor([[[1.0]]])
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    tp = LossHead(3, None, 0, TensorParallel())
    loss, _, weight_grad = ours(x, weight, torch.tensor([[1]]), torch.ones(1, 1), tp)
    assert loss.item() == 2e4 and weight_grad.flatten().tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("wanted", [0, 1])
def test_only_what_is_asked_for(way, wanted):
    x, weight, labels, mask = case(torch.float64)
    inputs = [x.clone(), weight.clone()]
    inputs[wanted].requires_grad_()
    linear_cross_entropy(*inputs, Targets(labels, mask), head(3 * CHUNK)).backward()
    assert inputs[1 - wanted].grad is None
    assert torch.equal(
        inputs[wanted].grad, ours(x, weight, labels, mask, head(3 * CHUNK))[1 + wanted]
    )


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_without_gradients_there_is_one_product(way):
    x, weight, labels, mask = case(torch.float32)
    with torch.no_grad(), Products() as products:
        loss = linear_cross_entropy(x, weight.requires_grad_(), Targets(labels, mask), head())
    assert products.count == 1
    assert differences([loss], torchs(x, weight.detach(), labels, mask)[:1])[0] <= 1e-6


def test_a_second_backward_pass_is_an_error_and_not_wrong():
    x, weight, labels, mask = case(torch.float32)
    loss = linear_cross_entropy(x.requires_grad_(), weight, Targets(labels, mask), head())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_autocast_multiplies_in_16_bits():
    x, weight, labels, mask = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x, weight, labels, mask)
    assert found[1].dtype == found[2].dtype == torch.float32
    expected = ours(x.bfloat16(), weight.bfloat16(), labels, mask)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


class Products(TorchDispatchMode):
    """Counts matrix products, and records the largest new tensor."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "mm" in str(func)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_never_whole(monkeypatch, dtype):
    monkeypatch.setattr(sums, "WORK_BYTES", 2**14)
    tokens, vocab, width, limit = 256, 1024, 16, 2**16
    x = torch.randn(1, tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()
    targets = Targets(torch.randint(vocab, (1, tokens)), torch.ones(1, tokens))
    with Products() as products:
        loss = LossHead(vocab, None, limit, TensorParallel())
        linear_cross_entropy(x, weight, targets, loss).backward()
    assert products.largest == limit, "of the logits, which are 8 or 16 times as many"
    assert products.count == 3 * tokens * vocab * dtype.itemsize // limit


@pytest.mark.parametrize("way", ["definition"], indirect=True)
def test_the_definition_knows_logits_that_a_rank_of_many_has(way):
    """Whole blocks of padding and of -inf, and no token at all."""
    width = 2 * 1024 + 3
    logits = torch.randn(5, width)
    logits[1, 10 : 10 + 2 * 1024 - 20] = -torch.inf
    logits[2, 1024:] = -torch.inf
    labels = torch.tensor([0, 7, -1, 2, 3])
    for used in (width - 2, 10, 0):
        part = softmax_loss.softmax_of(logits, labels, softmax_loss.Columns(used, None))
        assert all(torch.isfinite(each).all() for each in part)
        if used:
            expected = logits[:, :used].double().logsumexp(-1)
            assert torch.allclose((part.largest_C + part.total_C.log()).double(), expected)
        assert part.target_C[2] == 0


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, one kernel for each; views are free, and of
    a gather or scatter only what is moved counts."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or "empty" in name:
            return result
        if "gather" in name or "scatter" in name:
            self.bytes += 2 * args[2].numel() * args[0].element_size()
            return result
        read = tree_leaves(args[1:] if name == "aten::copy_" else args)
        moved = [each for each in (*read, *tree_leaves(result)) if isinstance(each, torch.Tensor)]
        self.bytes += sum(each.nbytes for each in moved)
        return result


@pytest.fixture
def chunk():
    """Logits of a chunk, labels, weights and columns; and how many logits. The compiler counts a
    tensor whole where a kernel reads part of it, so the columns are whole blocks."""
    if missing_compiler("cpu"):
        pytest.skip(missing_compiler("cpu"))
    tokens, padded, vocab = 32, 8192, 8000
    logits = torch.randn(tokens, padded).bfloat16()
    labels, weight = torch.randint(vocab, (tokens,)), torch.ones(tokens)
    return logits, labels, weight, softmax_loss.Columns(vocab, None), tokens * padded


def test_compiled_logits_are_read_twice_and_written_once(chunk):
    """6 bytes of traffic a token and column; eager kernels have five times as much."""
    logits, labels, weight, columns, each = chunk
    whole = compiled_traffic(softmax_loss.loss_and_gradient, logits, labels, weight, columns)
    assert 6 <= whole / each <= 6.1, whole / each
    with Traffic() as eager:
        used = logits[:, : columns.used]
        softmax_loss.eager_loss(used, labels, columns, SINGLE, gradients=True)
    assert 26 <= eager.bytes / each <= 32


@pytest.mark.parametrize("width", [2048, 2500, 500])
def test_nothing_is_padded_or_joined_for_the_compiler(width):
    """Its code for GPUs would write all logits out again, in float32."""
    columns = softmax_loss.Columns(width - 3, None)
    arguments = torch.randn(4, width).bfloat16(), torch.zeros(4, dtype=torch.int64), torch.ones(4)
    traced = make_fx(partial(softmax_loss.loss_and_gradient, columns=columns))(*arguments)
    names = {str(node.target) for node in traced.graph.nodes}
    assert "aten.amax.default" in names
    assert not [name for name in names if re.search("pad|cat|stack|clone|contiguous", name)]


@pytest.mark.proof
def test_tensor_parallel_logits_are_read_no_more_often(chunk):
    """The same, in two parts with a collective between them."""
    logits, labels, weight, columns, each = chunk
    softmax = softmax_loss.softmax_of(logits, labels, columns)
    first = compiled_traffic(softmax_loss.softmax_of, logits, labels, columns)
    arguments = logits, labels, weight, softmax, columns
    second = compiled_traffic(softmax_loss.write_gradient, *arguments)
    assert 2 <= first / each <= 2.05 and 4 <= second / each <= 4.05


def test_chunks_of_compiled_logits():
    """8,192 tokens, at most 2,560 MiB, in multiples of 256; the user's bound is as it was."""
    default = partial(logits_chunk, "cuda", chunk_bytes=None, compiled=True)
    assert default(2 * 32_000) == (8192, 256)
    assert default(2 * 152_064) == (8192, 256)
    assert default(2 * 200_000) == (6656, 256)
    assert default(4 * 4_000_000) == (256, 256)
    assert logits_chunk("cuda", 2 * 32_000, 100 * 2 * 32_000, compiled=True) == (100, 1)
    assert logits_chunk("cuda", 2 * 32_000, 0, compiled=True) == (None, 1)
    assert [each.stop for each in cross_entropy._even_slices(10_000, 8192, 256)] == [5120, 10_000]


class Short:
    """A GPU's memory that has room for so many logits of a chunk."""

    def __init__(self, monkeypatch, tokens: int) -> None:
        real = torch.Tensor.new_empty

        def new_empty(tensor, *shape, **options):
            if shape[0] > tokens:
                raise torch.OutOfMemoryError
            return real(tensor, *shape, **options)

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
        monkeypatch.setattr(cross_entropy, "_fitting", {})


@pytest.mark.parametrize("way", ["definition"], indirect=True)
def test_where_memory_is_short_chunks_are_halved(monkeypatch, capsys, way):
    arguments = case(torch.float64, samples=1, rows=2000)
    expected = ours(*arguments)
    Short(monkeypatch, 600)
    default = head(None)
    for _ in range(2):  # the second knows from the beginning
        assert max(differences(ours(*arguments, default), expected)) <= 1e-14
    assert capsys.readouterr().out.splitlines() == [
        "loss: 1,024 tokens at a time, since memory is short",
        "loss: 512 tokens at a time, since memory is short",
    ]
    with pytest.raises(torch.OutOfMemoryError):
        ours(*arguments, head(8 * PADDED * 900))
    Short(monkeypatch, 200)
    with pytest.raises(torch.OutOfMemoryError):
        ours(*arguments, default)


def test_a_sum_of_products_replaces_what_its_memory_held(monkeypatch):
    """As GPUs add products to a float32 matrix; here torch.addmm gets matrices of its dtype."""
    calls, real = [], torch.addmm

    def addmm(total, left, right, *, out_dtype, beta, out):
        assert out is total and out_dtype == total.dtype == torch.float32
        assert left.dtype == right.dtype == torch.bfloat16
        calls.append(beta)
        return real(total, left.float(), right.float(), beta=beta, out=out)

    arguments = case(torch.bfloat16)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(cross_entropy, "adds_products", lambda *_: True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        found = ours(*arguments, head(3 * CHUNK))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls[0] == 0 and set(calls[1:]) == {1}
    assert max(differences(found, torchs(*arguments))) <= TOLERANCE[torch.bfloat16]


def test_torch_is_asked_whether_it_adds_products(monkeypatch):
    sums.adds_products.cache_clear()
    asked = partial(sums.adds_products, dtype=torch.bfloat16, into=torch.float32)
    assert not asked(torch.device("cpu"))

    def refuse(*_, **__):
        raise RuntimeError("self and mat2 must have the same dtype")

    monkeypatch.setattr(torch, "addmm", refuse)
    assert not asked(torch.device("meta"))
    monkeypatch.undo()
    sums.adds_products.cache_clear()
    assert asked(torch.device("meta"))


def test_a_gradient_is_rounded_once_however_it_is_scaled():
    """As on GPUs, in one kernel, and as on CPUs."""
    grad, factor = torch.randn(1000), torch.tensor([1 / 3])
    there = torch.mul(grad, factor, out=torch.empty(1000, dtype=torch.bfloat16))
    assert torch.equal(cross_entropy.scaled(grad, factor, torch.bfloat16), there)


def test_a_gpu_compiles_and_a_cpu_does_not_ask(monkeypatch, capsys):
    """Without a compiler a GPU's loss is computed eagerly, and in smaller chunks."""
    softmax_loss.compiles_for.cache_clear()
    asked = []
    monkeypatch.setattr(softmax_loss, "missing_compiler", asked.append)
    assert not softmax_loss.compiles_for("cpu") and not asked
    with FakeTensorMode():
        x = torch.empty(10_000, 8, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(50_304, 8, dtype=torch.bfloat16, device="cuda")
        labels = torch.empty(10_000, dtype=torch.int64, device="cuda")
        targets = Targets(labels, torch.empty(10_000, device="cuda"))
        how = LossHead(50_257, None, None, TensorParallel())
        run = cross_entropy.LogitChunks(x, weight, None, targets, how, (True, True, False))
        assert run.compiled and len(run.chunks) == 2 and run.logits_CP.device.type == "cuda"
        assert asked == ["cuda"] and not capsys.readouterr().out
        softmax_loss.compiles_for.cache_clear()
        monkeypatch.setattr(softmax_loss, "missing_compiler", lambda kind: "no C compiler found")
        assert len(cross_entropy.LogitChunks(x, weight, None, targets, how).chunks) == 4
    assert "loss: no C compiler found; it is computed eagerly" in capsys.readouterr().out
    softmax_loss.compiles_for.cache_clear()
