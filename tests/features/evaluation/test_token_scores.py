"""Scores of targets on one rank; tests/distributed/evaluation has them on several."""

import pytest
import torch
import torch.nn.functional as F

from megatron.features.evaluation.scoring import linear_scores
from megatron.kernels import sums
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.tensor_parallel import TensorParallel

VOCAB, PADDED, WIDTH = 33, 40, 12
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def case(dtype):
    """Padding whose logits are the largest, and labels of which some are on it."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, WIDTH, generator=draw, dtype=torch.float64)
    weight = torch.randn(PADDED, WIDTH, generator=draw, dtype=torch.float64)
    bias = torch.randn(PADDED, generator=draw, dtype=torch.float64)
    bias[VOCAB:] = 100.0
    labels = torch.randint(VOCAB, (2, 7), generator=draw)
    labels[:, 1] = -1
    return x.to(dtype), weight.to(dtype), bias.to(dtype), labels, (labels >= 0).float()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_bytes", [0, 200])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_torch(monkeypatch, dtype, chunk_bytes, softcap):
    monkeypatch.setattr(sums, "WORK_BYTES", 3 * 4 * VOCAB)
    x, weight, bias, labels, mask = case(dtype)
    head = LossHead(VOCAB, softcap, chunk_bytes, TensorParallel())
    logits = F.linear(x, weight, bias)[..., :VOCAB].to(torch.promote_types(dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    # Half of the labels are the most probable token.
    labels = torch.where((torch.arange(7) % 2 == 0) & (mask > 0), logits.argmax(-1), labels)
    found = linear_scores(x, weight, Targets(labels, mask), head, bias)
    wanted = logits.double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert found.log_probs_BP.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        found.log_probs_BP.double(), wanted * mask, rtol=tolerance, atol=tolerance
    )
    correct = (logits.argmax(-1) == labels) & (mask > 0)
    assert found.correct_BP.tolist() == correct.tolist() and 0 < correct.sum() < mask.sum()


def test_of_tokens_that_are_equally_probable_the_first_is_correct():
    x, weight = torch.ones(1, 3, 2), torch.zeros(PADDED, 2)
    weight[5] = weight[20] = 1.0
    head = LossHead(VOCAB, None, 0, TensorParallel())
    targets = Targets(torch.tensor([[5, 20, 6]]), torch.ones(1, 3))
    assert linear_scores(x, weight, targets, head).correct_BP.tolist() == [[True, False, False]]


def test_scores_of_nan():
    head = LossHead(VOCAB, None, 0, TensorParallel())
    x, targets = (
        torch.full((1, 1, 2), torch.nan),
        Targets(torch.zeros(1, 1).long(), torch.ones(1, 1)),
    )
    found = linear_scores(x, torch.ones(PADDED, 2), targets, head)
    assert found.log_probs_BP.isnan().all()


def test_only_some_positions_are_taken():
    x, weight, bias, labels, mask = case(torch.float64)
    head = LossHead(VOCAB, None, 0, TensorParallel())
    whole = linear_scores(x, weight, Targets(labels, mask), head, bias)
    positions = torch.tensor([[0, 6, 1], [2, 3, 5]])
    some = Targets(labels, mask).at(positions)
    at = Targets(some.labels_BS, some.mask_BS, positions)
    taken, targets = at.taken(x, TensorParallel())
    found = linear_scores(taken, weight, targets, head, bias)
    torch.testing.assert_close(found.log_probs_BP, whole.log_probs_BP.gather(1, positions))
    assert found.correct_BP.equal(whole.correct_BP.gather(1, positions))
