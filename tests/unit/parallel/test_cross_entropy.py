"""Cross entropy on one rank; tests/distributed/parallel has it on several."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel import cross_entropy
from megatron.parallel.cross_entropy import masked_mean, vocab_parallel_cross_entropy
from megatron.parallel.groups import SINGLE

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}


def case(dtype, rows=7, vocab=33, padded=40, scale=3.0):
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, rows, padded, generator=draw, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(vocab, (2, rows), generator=draw)
    weights = torch.rand(2, rows, generator=draw, dtype=torch.float64)
    return logits, labels, weights


def ours(logits, labels, vocab, weights):
    logits = logits.clone().requires_grad_()
    # Not a leaf, as in a model: the backward pass overwrites it.
    loss = vocab_parallel_cross_entropy(logits * 1.0, labels, vocab, SINGLE)
    (loss * weights.to(loss.dtype)).sum().backward()
    return loss.detach(), logits.grad


def torchs(logits, labels, vocab, weights):
    logits = logits.clone().requires_grad_()
    work = torch.promote_types(logits.dtype, torch.float32)
    used = logits[..., :vocab].to(work)
    loss = F.cross_entropy(used.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    (loss * weights.to(work)).sum().backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("padded", [33, 40], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_torch_cross_entropy(dtype, padded):
    logits, labels, weights = case(dtype, padded=padded)
    loss, grad = ours(logits, labels, 33, weights)
    loss_torch, grad_torch = torchs(logits, labels, 33, weights)
    assert loss.dtype == torch.promote_types(dtype, torch.float32) and grad.dtype == dtype
    assert (loss - loss_torch).abs().max() <= TOLERANCE[dtype] * loss_torch.abs().max()
    assert (grad - grad_torch).abs().max() <= TOLERANCE[dtype] * grad_torch.abs().max()
    assert torch.count_nonzero(grad[..., 33:]) == 0


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7, 13, 14, 15])
def test_chunks_change_nothing(monkeypatch, rows_per_chunk):
    arguments = case(torch.float64)
    expected = ours(arguments[0], arguments[1], 33, arguments[2])
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", rows_per_chunk * 4 * 40)
    found = ours(arguments[0], arguments[1], 33, arguments[2])
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    labels = torch.tensor([[1]])
    loss, grad = ours(logits, labels, 3, torch.ones(1, 1))
    assert loss.item() == 2e4 and grad.flatten().tolist() == [1.0, -1.0, 0.0]


def test_logits_that_are_not_contiguous():
    logits, labels, weights = case(torch.float64, padded=33)
    turned = logits.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(ours(turned, labels, 33, weights)[1], ours(logits, labels, 33, weights)[1])


def test_a_second_backward_pass_is_an_error_and_not_wrong():
    logits, labels, _ = case(torch.float32)
    loss = vocab_parallel_cross_entropy(logits.requires_grad_() * 1.0, labels, 33, SINGLE).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


class LargestAllocation(TorchDispatchMode):
    """Records the largest new tensor of a number format."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.largest, self.known = dtype, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in args:
            if isinstance(value, torch.Tensor):
                self.known.add(value.untyped_storage().data_ptr())
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == self.dtype:
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.largest = max(self.largest, storage.nbytes())
        return result


def test_logits_are_never_copied_whole(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 2**14)
    tokens, vocab = 256, 1024
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(1, tokens, vocab, generator=draw).bfloat16().requires_grad_()
    head = logits * 1
    labels = torch.randint(vocab, (1, tokens), generator=draw)
    for dtype in (torch.float32, torch.bfloat16):
        with LargestAllocation(dtype) as record:
            loss = vocab_parallel_cross_entropy(head, labels, vocab, SINGLE).sum()
            (grad,) = torch.autograd.grad(loss, head)
        assert 0 < record.largest <= 2**14
        assert grad.data_ptr() == head.data_ptr(), "the gradient takes the place of the logits"
        head = logits * 1


def test_masked_mean():
    loss = torch.tensor([[1.0, 2.0], [3.0, 100.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert masked_mean(loss, mask).item() == 2.0


def test_masked_mean_of_nothing_is_zero_with_zero_gradient():
    loss = torch.tensor([[1.0, 2.0]], requires_grad=True)
    mean = masked_mean(loss, torch.zeros(1, 2))
    mean.backward()
    assert mean.item() == 0.0 and loss.grad.tolist() == [[0.0, 0.0]]
