"""The loss of a head on one rank; tests/distributed/parallel has it on several."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel import cross_entropy
from megatron.parallel.cross_entropy import LossHead, Targets, linear_cross_entropy
from megatron.parallel.tensor_parallel import TensorParallel

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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_bytes", [0, 3 * CHUNK])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_torch_cross_entropy(dtype, chunk_bytes, softcap):
    arguments = case(dtype)
    found = ours(*arguments, head(chunk_bytes, softcap))
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert found[1].dtype == found[2].dtype == dtype
    assert max(differences(found, torchs(*arguments, softcap))) <= TOLERANCE[dtype]
    assert torch.count_nonzero(found[2][VOCAB:]) == 0


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
    monkeypatch.setattr(cross_entropy, "WORK_BYTES", work_rows * CHUNK)
    found = ours(*arguments, head(2 * CHUNK * tokens))
    assert max(differences(found, expected)) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1 / 3, 1 / 60, 7.0, 2.0**14])
def test_nothing_is_scaled_as_a_whole(dtype, factor):
    """Accumulation divides the loss, fp16 multiplies it, a mask leaves tokens out: of rounding the
    projection on the exact gradient must know nothing."""
    arguments = case(dtype, samples=16, rows=64)
    assert 600 < arguments[3].sum() < 1000, "no power of two"
    found = ours(*arguments, head(300 * CHUNK), factor=factor)
    expected = torchs(*arguments, factor=factor)
    for mine, exact in zip(found[1:], expected[1:], strict=True):
        along = float((mine.double() * exact).sum() / exact.square().sum())
        assert along == pytest.approx(1.0, abs=1.2e-3 if dtype != torch.float32 else 1e-6)


def test_few_tokens_that_count_do_not_overflow_float16():
    """Whatever the loss scale, which comes after."""
    x, weight, labels, mask = case(torch.float16, samples=64, rows=128)
    mask.zero_()[5, 7] = 1.0
    found = ours(x * 10, weight * 1e-2, labels, mask, factor=1.0)
    expected = torchs(x * 10, weight * 1e-2, labels, mask)
    assert max(differences(found, expected)) <= TOLERANCE[torch.float16]


def test_small_gradients_are_not_lost_in_float16():
    """A token of many has a gradient below what float16 can hold; the loss scale comes after."""
    x, weight, labels, _ = case(torch.float16, samples=64, rows=64)
    arguments = x, weight * 1e-3, labels, torch.ones(64, 64)
    found = ours(*arguments, head(64 * CHUNK), factor=2.0**14)
    expected = torchs(*arguments, factor=2.0**14)
    assert max(differences(found, expected)) <= TOLERANCE[torch.float16]


def test_no_token_counts():
    x, weight, labels, mask = case(torch.float32)
    loss, *gradients = ours(x, weight, labels, torch.zeros_like(mask))
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_large_logits_do_not_overflow():
    x = torch.tensor([[[1.0]]])
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    tp = LossHead(3, None, 0, TensorParallel())
    loss, _, weight_grad = ours(x, weight, torch.tensor([[1]]), torch.ones(1, 1), tp)
    assert loss.item() == 2e4 and weight_grad.flatten().tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_what_is_asked_for(wanted):
    x, weight, labels, mask = case(torch.float64)
    inputs = [x.clone(), weight.clone()]
    inputs[wanted].requires_grad_()
    linear_cross_entropy(*inputs, Targets(labels, mask), head(3 * CHUNK)).backward()
    assert inputs[1 - wanted].grad is None
    assert torch.equal(
        inputs[wanted].grad, ours(x, weight, labels, mask, head(3 * CHUNK))[1 + wanted]
    )


def test_without_gradients_there_is_one_product():
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
    monkeypatch.setattr(cross_entropy, "WORK_BYTES", 2**14)
    tokens, vocab, width, limit = 256, 1024, 16, 2**16
    x = torch.randn(1, tokens, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()
    targets = Targets(torch.randint(vocab, (1, tokens)), torch.ones(1, tokens))
    with Products() as products:
        loss = LossHead(vocab, None, limit, TensorParallel())
        linear_cross_entropy(x, weight, targets, loss).backward()
    assert products.largest == limit, "of the logits, which are 8 or 16 times as many"
    assert products.count == 3 * tokens * vocab * dtype.itemsize // limit
