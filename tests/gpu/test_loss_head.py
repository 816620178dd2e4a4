"""The loss head as a GPU runs it: compiled, in large chunks, with sums in the products."""

import pytest
import torch
import torch.nn.functional as F
from gpu_runs import DEVICE, needs_gpu, no_waiting
from torch import Tensor

from megatron.kernels import sums
from megatron.parallel import cross_entropy, softmax_loss
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.tensor_parallel import TensorParallel

TOKENS, WIDTH, VOCAB, PADDED = 1024, 256, 5001, 5120
LIMITS = {torch.float32: 5e-3, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest error of a gradient, as a share of the largest (products of float32 may be TF32's)."""


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Targets]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS // 2, WIDTH, generator=draw)
    weight = 0.1 * torch.randn(PADDED, WIDTH, generator=draw)
    labels = torch.randint(VOCAB, (2, TOKENS // 2), generator=draw)
    mask = (torch.rand(2, TOKENS // 2, generator=draw) < 0.7).float()
    targets = Targets(labels.to(DEVICE), mask.to(DEVICE))
    x, weight = (each.to(DEVICE, dtype).requires_grad_() for each in (x, weight))
    return x, weight, targets


def head(tokens: int | None, softcap: float | None, dtype: torch.dtype) -> LossHead:
    """One that takes so many tokens at a time; None for the default."""
    size = None if tokens is None else tokens * PADDED * dtype.itemsize
    return LossHead(VOCAB, softcap, size, TensorParallel())


def in_float64(x: Tensor, weight: Tensor, targets: Targets, softcap: float | None) -> list[Tensor]:
    inputs = [each.detach().double().requires_grad_() for each in (x, weight)]
    logits = F.linear(inputs[0], inputs[1][:VOCAB]).flatten(0, 1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets.labels_BS.flatten(), reduction="none")
    mask = targets.mask_BS.flatten().double()
    loss = loss @ mask / mask.sum()
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("tokens", [None, 256, 300], ids=["whole", "even", "uneven"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_against_float64(dtype, tokens, softcap):
    x, weight, targets = case(dtype)
    loss = linear_cross_entropy(x, weight, targets, head(tokens, softcap, dtype))
    loss.backward()
    expected = in_float64(x, weight, targets, softcap)
    for found, wanted in zip((loss.detach(), x.grad, weight.grad), expected, strict=True):
        error = float((found.double() - wanted).abs().max() / wanted.abs().max())
        assert error <= LIMITS[dtype], error
    assert torch.count_nonzero(weight.grad[VOCAB:]) == 0


@needs_gpu
def test_it_is_compiled_and_the_cpu_only_queues_work(monkeypatch):
    assert softmax_loss.compiles_for("cuda"), "this machine lacks a compiler"
    monkeypatch.setattr(cross_entropy, "eager_loss", None)
    x, weight, targets = case(torch.bfloat16)
    how = head(256, None, torch.bfloat16)
    linear_cross_entropy(x, weight, targets, how).backward()
    with no_waiting():
        linear_cross_entropy(x, weight, targets, how).backward()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_products_are_float32(dtype):
    """Which this torch may not have; then the test says so, and another way is taken."""
    if not sums.adds_products(DEVICE, dtype, torch.float32):
        pytest.skip(f"torch {torch.__version__} adds no 16-bit products to a float32 matrix")
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 32, generator=draw).to(DEVICE, dtype) for _ in range(2))
    total = torch.full((32, 32), torch.nan, device=DEVICE)
    sums.add_product(total, left, right, 0)
    sums.add_product(total, left, right, 1)
    wanted = 2 * (left.double().t() @ right.double())
    assert float((total - wanted).abs().max() / wanted.abs().max()) < 1e-5


@needs_gpu
def test_nothing_but_a_chunk_of_logits_takes_memory():
    """No float32 copy of them, and no second matrix of the weight's size."""
    tokens, vocab, width = 4096, 66_048, 256
    x = torch.randn(1, tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (1, tokens), device=DEVICE)
    targets = Targets(labels, torch.ones(1, tokens, device=DEVICE))
    how = LossHead(vocab, None, tokens * vocab, TensorParallel())  # two chunks of bfloat16
    linear_cross_entropy(x, weight, targets, how).backward()
    x.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, targets, how)
    grown = torch.cuda.max_memory_allocated() - before
    logits, sums = tokens // 2 * vocab * 2, 4 * weight.numel()
    assert grown <= 1.1 * (logits + sums + x.nbytes), grown
