"""The loss of a student on one rank, against torch; tests/distributed/parallel has two."""

import pytest
import torch
import torch.nn.functional as F

from megatron.features.distillation import divergence
from megatron.features.distillation.divergence import (
    Distilling,
    TeacherHead,
    linear_distillation,
    linear_top_tokens,
)
from megatron.kernels import sums
from megatron.parallel.cross_entropy import linear_cross_entropy
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.tensor_parallel import TensorParallel

ROWS, WIDTH, TEACHER_WIDTH, VOCAB, PADDED = 7, 12, 10, 33, 40
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def draws(dtype, *shapes):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def case(dtype, teacher_vocab=VOCAB):
    x, weight, teacher_x, teacher_weight = draws(
        dtype, (2, ROWS, WIDTH), (PADDED, WIDTH), (2, ROWS, TEACHER_WIDTH), (PADDED, TEACHER_WIDTH)
    )
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCAB, (2, ROWS), generator=draw)
    mask = (torch.rand(2, ROWS, generator=draw) < 0.7).float()
    teacher = TeacherHead(teacher_x, teacher_weight, None, head(vocab=teacher_vocab))
    return x, weight, Targets(labels, mask), teacher


def head(chunk_bytes=0, softcap=None, vocab=VOCAB):
    return LossHead(vocab, softcap, chunk_bytes, TensorParallel())


def ours(x, weight, targets, teacher, terms, how=None, factor=1.0):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    losses = linear_distillation(x, weight, targets, how or head(), teacher, terms)
    (losses.total * factor).backward()
    return [*(loss.detach() for loss in losses), x.grad, weight.grad]


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def torchs(x, weight, targets, teacher, terms, softcap=None, factor=1.0, target=None):
    """In float64, from the same numbers: torch's KLDivLoss of whole logits, the loss of a student
    in trl's GKDTrainer (beta 0) but for the square of the temperature."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = capped(F.linear(x, weight[:VOCAB]), softcap)
    common = min(VOCAB, teacher.head.vocab_size)
    taught = F.linear(teacher.x_BPH.double(), teacher.weight_VH.double()[:common])
    taught = capped(taught, teacher.head.softcap)
    ce = F.cross_entropy(logits.flatten(0, 1), targets.labels_BS.flatten(), reduction="none")
    soft = F.log_softmax(logits / terms.temperature, -1)
    soft, taught = soft[..., :common], F.log_softmax(taught / terms.temperature, -1)
    if target is not None:
        soft, taught = target(soft, taught)
    kl = F.kl_div(soft, taught, reduction="none", log_target=True).sum(-1).flatten()
    mask = targets.mask_BS.flatten().double()
    ce, kl = (each @ mask / mask.sum() for each in (ce, terms.temperature**2 * kl))
    total = terms.alpha * ce + terms.beta * kl
    (total * factor).backward()
    return [total.detach(), ce.detach(), kl.detach(), x.grad, weight.grad]


def off(found, expected):
    return max(
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    "terms", [Distilling(), Distilling(0.3, 1.7, 2.5), Distilling(0.0, 1.0, 4.0)], ids=str
)
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_torchs_divergence(dtype, chunk, terms, monkeypatch):
    monkeypatch.setattr(sums, "WORK_BYTES", 2 * 4 * VOCAB)  # two rows at a time
    x, weight, targets, teacher = case(dtype)
    teacher = teacher._replace(head=head(softcap=3.0))
    how = head(chunk * PADDED * x.element_size(), softcap=2.0)
    found = ours(x, weight, targets, teacher, terms, how, factor=3.0)
    expected = torchs(x, weight, targets, teacher, terms, softcap=2.0, factor=3.0)
    assert off(found, expected) <= TOLERANCE[dtype]
    assert not found[-1][VOCAB:].any()


@pytest.mark.parametrize("tokens", [VOCAB - 3, VOCAB + 3])
def test_a_teacher_of_another_vocabulary(tokens):
    x, weight, targets, teacher = case(torch.float64, tokens)
    terms = Distilling(temperature=2.0)
    found = ours(x, weight, targets, teacher, terms)
    assert off(found, torchs(x, weight, targets, teacher, terms)) <= 1e-13


def test_without_beta_it_is_the_cross_entropy():
    x, weight, targets, teacher = case(torch.float64)
    inputs = [each.clone().requires_grad_() for each in (x, weight)]
    loss = linear_cross_entropy(*inputs, targets, head())
    loss.backward()
    expected = [loss.detach(), loss.detach(), *(each.grad for each in inputs)]
    total, ce, _, *gradients = ours(x, weight, targets, teacher, Distilling(beta=0.0))
    assert off([total, ce, *gradients], expected) <= 1e-13


def test_a_teacher_that_is_the_student_teaches_nothing():
    x, weight, targets, _ = case(torch.float64)
    teacher = TeacherHead(x, weight, None, head())
    _, _, divergence, *gradients = ours(x, weight, targets, teacher, Distilling(alpha=0.0))
    assert abs(divergence) < 1e-14
    assert all(each.abs().max() < 1e-14 for each in gradients)


def test_what_is_masked_counts_for_nothing():
    """Upstream's divergence is a mean over all positions, masked or not."""
    x, weight, targets, teacher = case(torch.float64)
    found = ours(x, weight, targets, teacher, Distilling())
    nonsense = teacher.x_BPH.clone()
    nonsense[targets.mask_BS == 0] = 1e3
    again = ours(x, weight, targets, teacher._replace(x_BPH=nonsense), Distilling())
    assert off(again, found) <= 1e-15
    assert not found[3][targets.mask_BS == 0].any()


def coarse(count):
    """The distributions over a teacher's ``count`` most probable tokens and all others as one."""

    def target(soft, taught):
        top = taught.detach().topk(count, -1).indices
        parts = []
        for log_probs in (soft, taught):
            others = log_probs.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
            parts.append(torch.cat((log_probs.gather(-1, top), others), -1))
        return parts

    return target


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("count", [1, 5])
def test_the_most_probable_tokens_of_a_teacher(count, chunk):
    x, weight, targets, teacher = case(torch.float64)
    terms = Distilling(0.3, 1.7, 2.5)
    top = linear_top_tokens(teacher, count, terms.temperature)
    found = ours(x, weight, targets, top, terms, head(chunk * PADDED * 8))
    expected = torchs(x, weight, targets, teacher, terms, target=coarse(count))
    assert off(found, expected) <= 1e-6  # they are kept in float32
    whole = torchs(x, weight, targets, teacher, terms)
    assert found[2] < whole[2]


def test_all_tokens_of_a_teacher_are_the_whole_teacher():
    x, weight, targets, teacher = case(torch.float64)
    terms = Distilling(temperature=2.0)
    top = linear_top_tokens(teacher, VOCAB, terms.temperature)
    assert not top.rest_BP.any()
    assert (
        off(ours(x, weight, targets, top, terms), ours(x, weight, targets, teacher, terms)) < 1e-6
    )


def test_evaluations_compute_no_gradients(monkeypatch):
    x, weight, targets, teacher = case(torch.float64)
    found = ours(x, weight, targets, teacher, Distilling())
    monkeypatch.setattr(divergence._Student, "write", None)
    with torch.no_grad():
        alone = linear_distillation(x, weight, targets, head(), teacher, Distilling())
    assert off(alone, found[:3]) <= 1e-15
