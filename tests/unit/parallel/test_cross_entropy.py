"""The loss of a head on one rank; tests/distributed/parallel has it on several."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.parallel import cross_entropy, softmax_loss
from megatron.parallel.compiler import missing_compiler
from megatron.parallel.cross_entropy import LossHead, Targets, linear_cross_entropy
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


@pytest.mark.parametrize("way", ["compiled"], indirect=True)
@pytest.mark.parametrize("gradients", [True, False])
def test_generated_code_against_torch_cross_entropy(way, gradients):
    """Chunks of two sizes, the last of which is the first that is not compiled for its size."""
    arguments, how = case(torch.bfloat16), head(3 * CHUNK, 2.0)
    expected = torchs(*arguments, 2.0)
    if gradients:
        found = ours(*arguments, how)
    else:
        found = [linear_cross_entropy(*arguments[:2], Targets(*arguments[2:]), how)]
    pairs = zip(found, expected, strict=gradients)
    assert all(differences([a], [b])[0] <= TOLERANCE[torch.bfloat16] for a, b in pairs)


@pytest.mark.parametrize(("device", "chunks"), [("cpu", 3), ("meta", 1)])
def test_a_gpu_takes_larger_chunks_by_default(device, chunks):
    """64 KiB of float32 logits a token: 1,024 tokens are 64 MiB. The meta device is no CPU."""
    x = torch.empty(3000, 1, device=device)
    labels = torch.zeros(1, 3000, dtype=torch.int64, device=device)
    how = LossHead(2**14, None, None, TensorParallel())
    weight = torch.empty(2**14, 1, device=device)
    run = cross_entropy._Chunks(x, weight, Targets(labels, torch.ones_like(labels)), how)
    assert len(run.chunks) == chunks


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 13, 14, 15])
@pytest.mark.parametrize("work_rows", [1, 4, 100])
def test_chunks_change_nothing(monkeypatch, tokens, work_rows):
    arguments = case(torch.float64)
    expected = ours(*arguments)
    monkeypatch.setattr(softmax_loss, "WORK_BYTES", work_rows * CHUNK)
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
    monkeypatch.setattr(softmax_loss, "WORK_BYTES", 2**14)
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
    """Whole blocks of padding, logits of -inf, and no token at all."""
    width = softmax_loss.BLOCK + 3
    logits = torch.randn(5, width)
    logits[1, :7] = -torch.inf
    labels = torch.tensor([0, 7, -1, 2, 3])
    for used in (width - 2, 10, 0):
        part = softmax_loss.softmax_of(logits, labels, softmax_loss.Columns(used, None))
        assert all(torch.isfinite(each).all() for each in part)
        if used:
            expected = logits[:, :used].double().logsumexp(-1)
            assert torch.allclose((part.largest_C + part.total_C.log()).double(), expected)
        assert part.target_C[2] == 0


def traffic(work) -> float:
    """Bytes that the kernels of eager tensor operations read and write, one kernel an operation."""
    with Traffic() as found:
        work()
    return found.bytes


class Traffic(TorchDispatchMode):
    """Adds up the tensors that operations take and return, but for views."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            tensors = tree_leaves((args, kwargs, result))
            # What is written in place is read and written.
            self.bytes += sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        return result


def compiled_traffic(function, *arguments) -> float:
    """The same of a compiled function, as torch's compiler counts its kernels'."""
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    metrics.reset()
    level = inductor_metrics_log.level
    inductor_metrics_log.setLevel(logging.INFO)
    try:
        with config.patch(fx_graph_cache=False):
            torch._dynamo.reset()
            torch.compile(function, fullgraph=True, dynamic=False)(*arguments)
    finally:
        inductor_metrics_log.setLevel(level)
    return metrics.num_bytes_accessed


def test_compiled_logits_are_read_twice_and_written_once():
    """6 bytes a column and token of 16-bit logits, where eager kernels move more than 30. A part of
    either, for tensor parallelism, has its own share of them."""
    if missing_compiler("cpu"):
        pytest.skip(missing_compiler("cpu"))
    tokens, padded, vocab = 32, 8192, 8000
    columns = softmax_loss.Columns(vocab, None)
    logits = torch.randn(tokens, padded).bfloat16()
    labels, weight = torch.randint(vocab, (tokens,)), torch.ones(tokens)

    def eager() -> None:
        softmax_loss.eager_loss(logits[:, :vocab], labels, columns, SINGLE, gradients=True)

    each = tokens * padded
    assert traffic(eager) / each > 30
    whole = compiled_traffic(softmax_loss.loss_and_gradient, logits, labels, weight, columns)
    assert 6 <= whole / each <= 6.1
    softmax = softmax_loss.softmax_of(logits, labels, columns)
    first = compiled_traffic(softmax_loss.softmax_of, logits, labels, columns)
    arguments = logits, labels, weight, softmax, columns
    second = compiled_traffic(softmax_loss.write_gradient, *arguments)
    assert 2 <= first / each <= 2.1 and 4 <= second / each <= 4.1
    print("bytes", traffic(eager) / each, whole / each, first / each, second / each)
