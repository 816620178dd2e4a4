"""Losses of a student whose vocabulary ranks divide, against those of one rank, which
tests/features/distillation compares with torch's."""

import torch
from pool import tensor_group

from megatron.features.distillation.divergence import (
    Distilling,
    TeacherHead,
    linear_distillation,
    linear_top_tokens,
)
from megatron.parallel.loss_head import LossHead, Targets
from megatron.parallel.tensor_parallel import TensorParallel

LENGTH, WIDTH, VOCAB, PADDED = 7, 12, 33, 40
TERMS = Distilling(0.3, 1.7, 2.5)


def distilled(tp: TensorParallel, count: int | None) -> list[torch.Tensor]:
    """Losses, gradients and, with ``count``, the teacher's most probable tokens; of the weight's
    gradient this rank's rows."""
    draw = torch.Generator().manual_seed(1)
    x, weight, taught, table = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((2, LENGTH, WIDTH), (PADDED, WIDTH), (2, LENGTH, WIDTH), (PADDED, WIDTH))
    )
    labels = torch.randint(VOCAB, (2, LENGTH), generator=draw)
    mask = (torch.rand(2, LENGTH, generator=draw) < 0.7).float()
    mine, theirs = (each.chunk(tp.group.size)[tp.group.rank].clone() for each in (weight, table))
    x.requires_grad_(), mine.requires_grad_()
    head = LossHead(VOCAB, 2.0, 0, tp)
    teacher = TeacherHead(taught, theirs, None, head)
    top = None if count is None else linear_top_tokens(teacher, count, TERMS.temperature)
    losses = linear_distillation(x, mine, Targets(labels, mask), head, top or teacher, TERMS)
    losses.total.backward()
    return [*(each.detach() for each in losses), x.grad, mine.grad, *(top or ())]


def compare() -> None:
    """For the pool. Probabilities of a teacher's tokens are kept in float32."""
    group = tensor_group()
    for count, tolerance in ((None, 1e-12), (1, 1e-6), (5, 1e-6)):
        expected = distilled(TensorParallel(), count)
        expected[4] = expected[4].chunk(group.size)[group.rank]
        for own, whole in zip(distilled(TensorParallel(group), count), expected, strict=True):
            torch.testing.assert_close(own, whole, rtol=tolerance, atol=tolerance)


def test_two_ranks_against_one(pool):
    pool.run(2, compare)
