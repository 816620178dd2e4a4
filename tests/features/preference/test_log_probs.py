"""Log-probabilities of a head's targets, and their gradients, on one rank; on several:
tests/distributed/parallel."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron.features.preference.log_probs import linear_log_probs
from megatron.parallel import cross_entropy, softmax_loss
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.tensor_parallel import TensorParallel

TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
ROWS, WIDTH, VOCAB, PADDED = 7, 12, 33, 40
TOKEN = 4 * PADDED  # bytes of its float32 logits


def case(dtype, bias=False):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, ROWS, WIDTH, generator=draw, dtype=torch.float64)
    weight = torch.randn(PADDED, WIDTH, generator=draw, dtype=torch.float64)
    addend = torch.randn(PADDED, generator=draw, dtype=torch.float64) if bias else None
    labels = torch.randint(VOCAB, (3, ROWS), generator=draw)
    mask = (torch.rand(3, ROWS, generator=draw) < 0.7).float()
    wanted = torch.randn(3, ROWS, generator=draw, dtype=torch.float64)
    tensors = [each if each is None else each.to(dtype) for each in (x, weight, addend)]
    return tensors, Targets(labels, mask), wanted


def head(chunk_bytes=0, softcap=None):
    return LossHead(VOCAB, softcap, chunk_bytes, TensorParallel())


def ours(tensors, targets, wanted, how):
    leaves = [each if each is None else each.clone().requires_grad_() for each in tensors]
    found = linear_log_probs(leaves[0], leaves[1], targets, how, leaves[2])
    found.backward(wanted.to(found.dtype))
    return found.detach(), *(leaf.grad for leaf in leaves if leaf is not None)


def torchs(tensors, targets, wanted, softcap=None):
    """In float64, from the same numbers."""
    leaves = [each if each is None else each.double().requires_grad_() for each in tensors]
    logits = F.linear(*leaves)[..., :VOCAB]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scores = logits.log_softmax(-1).gather(-1, targets.labels_BS[..., None]).squeeze(-1)
    found = scores * targets.mask_BS
    found.backward(wanted)
    return found.detach(), *(leaf.grad for leaf in leaves if leaf is not None)


def largest_difference(found, expected):
    return max(
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "definition"])
@pytest.mark.parametrize("chunk_bytes", [0, 5 * TOKEN])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_torch(monkeypatch, dtype, chunk_bytes, compiled):
    """As on CPUs, and as what is compiled on GPUs; in one chunk, whose logits are kept, and in
    several, all but one of which are computed again."""
    if compiled:
        monkeypatch.setattr(cross_entropy, "compiles_for", lambda kind: True)
        monkeypatch.setattr(softmax_loss, "compiled", lambda function: function)
    arguments = case(dtype, bias=dtype == torch.float64)
    found = ours(*arguments, head(chunk_bytes, 5.0))
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert all(grad.dtype == dtype for grad in found[1:])
    assert largest_difference(found, torchs(*arguments, 5.0)) <= TOLERANCE[dtype]
    assert not found[2][VOCAB:].any(), "padding has no gradient"


def test_small_gradients_in_float16():
    """Those of a loss are small: without a scale they would be zero in 16 bits before they are
    added up."""
    tensors, targets, wanted = case(torch.float16)
    tensors[1] = 30 * tensors[1]  # so that the gradient of the input is not tiny too
    found = ours(tensors, targets, 1e-6 * wanted, head())
    assert largest_difference(found, torchs(tensors, targets, 1e-6 * wanted)) <= 1e-1
    assert torch.count_nonzero(found[1]) > 0.5 * found[1].numel()


def test_the_mean_is_the_cross_entropy():
    (x, weight, _), targets, _ = case(torch.float64)
    x.requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, head())
    mean = -linear_log_probs(x, weight, targets, head()).sum() / targets.mask_BS.sum()
    (expected,), (found,) = (torch.autograd.grad(each, x) for each in (loss, mean))
    torch.testing.assert_close(mean, loss)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("chunk_bytes", "products"), [(0, 3), (7 * TOKEN, 3 + 2 / 3)])
def test_products(chunk_bytes, products):
    """Logits are computed twice only where they do not fit into a chunk: of three chunks two."""
    tensors, targets, wanted = case(torch.float32)
    with FlopCounterMode(display=False) as counter:
        ours(tensors, targets, wanted, head(chunk_bytes))
    assert counter.get_total_flops() == pytest.approx(products * 2 * 21 * WIDTH * PADDED)


def test_frozen_weights_cost_no_product():
    (x, weight, _), targets, wanted = case(torch.float32)
    x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear_log_probs(x, weight, targets, head()).backward(wanted.float())
    assert counter.get_total_flops() == 2 * 2 * 21 * WIDTH * PADDED
    assert weight.grad is None


def test_nothing_is_kept_without_gradients():
    (x, weight, _), targets, _ = case(torch.float32)
    assert linear_log_probs(x, weight, targets, head()).grad_fn is None
    weight.requires_grad_()
    with torch.no_grad():
        assert not linear_log_probs(x, weight, targets, head()).requires_grad
