"""Reduction in buckets within the backward pass, against sums of every rank's whole gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import tensor_group
from samples import sampled
from torch import Tensor, nn

from megatron.engine.update.reduction import (
    Bucket,
    GradientReduction,
    ReductionRules,
    start_reduction,
)
from megatron.parallel.mesh import SINGLE, Group

SIZES = (40, 24, 100, 7, 60)
"""Elements of the layers' weights, in the order of the forward pass."""
FORMS = {
    "fp32": (torch.float32, None, None),
    "bf16": (torch.bfloat16, None, None),
    "bf16, sums in fp32": (torch.bfloat16, torch.float32, torch.float32),
    "fp16, divided first": (torch.float16, None, None),
}
LAYOUTS = {
    "one": [[0, 1, 2, 3, 4]],
    "two": [[3, 4], [0, 1, 2]],
    "each": [[n] for n in (4, 3, 2, 1, 0)],
}
BATCHES = 3


def padded(params: list[nn.Parameter], size: int) -> int:
    """Their elements, so many that each rank has as many, and some more for the last."""
    total = sum(param.numel() for param in params)
    return -(-total // (2 * size)) * 2 * size


def buckets_of(weights: list[nn.Parameter], layout: list[list[int]], group: Group) -> list[Bucket]:
    buckets = []
    for numbers in layout:
        params = [weights[n] for n in numbers]
        starts = [sum(p.numel() for p in params[:n]) for n in range(len(params))]
        length = padded(params, group.size)
        buckets.append(Bucket(dict(zip(params, starts, strict=True)), length, group))
    return buckets


def loss(weights: list[nn.Parameter], x: Tensor, unused: int | None) -> Tensor:
    """Each weight has a gradient of its own; the last is used twice."""
    total = x.new_zeros(())
    for number, weight in enumerate(weights):
        if number != unused:
            total = total + (weight * x[: weight.numel()]).tanh().sum() * (number + 1) * total.cos()
    return total + (weights[-1] * weights[-1]).sum()


def inputs(rank: int, batch: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + batch)
    return torch.randn(max(SIZES), generator=generator).to(dtype)


def weights_of(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]


def average(
    weights: list[nn.Parameter], group: Group, stage: int, form: str, step: int
) -> list[Tensor]:
    """The definition: gradients of all ranks by themselves, added and divided."""
    dtype, sums, wire = FORMS[form]
    kind = sums or dtype

    def grads_of(rank: int, batch: int) -> list[Tensor]:
        x, unused = inputs(rank, 10 * step + batch, dtype), unused_in(rank, batch)
        grads = torch.autograd.grad(loss(weights, x, unused), weights, allow_unused=True)
        pairs = zip(weights, grads, strict=True)
        return [torch.zeros_like(w) if g is None else g for w, g in pairs]

    def summed(addends: list[list[Tensor]]) -> list[Tensor]:
        totals = [first.to(kind) for first in addends[0]]
        for grads in addends[1:]:
            totals = [total + grad for total, grad in zip(totals, grads, strict=True)]
        return totals

    ranks = range(group.size)
    if stage == 1:
        of_ranks = [summed([grads_of(rank, batch) for batch in range(BATCHES)]) for rank in ranks]
        return [mean.to(kind) for mean in mean_of(of_ranks, form, wire)]
    return summed(
        [mean_of([grads_of(rank, batch) for rank in ranks], form, wire) for batch in range(BATCHES)]
    )


def unused_in(rank: int, batch: int) -> int | None:
    """The weight without a gradient."""
    return 1 if (rank, batch) == (0, BATCHES - 1) else None


def mean_of(of_ranks: list[list[Tensor]], form: str, wire: torch.dtype | None) -> list[Tensor]:
    size, means = len(of_ranks), []
    for grads in zip(*of_ranks, strict=True):
        grads = tuple(grad.to(wire or grad.dtype) for grad in grads)
        if "first" in form:
            grads = tuple(grad / size for grad in grads)
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        means.append(total if "first" in form else total / size)
    return means


def reduced(stage: int, form: str, layout: str, overlapped: bool, scatters: bool) -> None:
    """Two steps of three micro batches; for the pool."""
    group = tensor_group()
    dtype, sums, wire = FORMS[form]
    weights = weights_of(dtype)
    buckets = buckets_of(weights, LAYOUTS[layout], group)
    rules = ReductionRules(
        stage == 2, group.size, overlapped, scatters, sums, wire, first="first" in form
    )
    reduction = GradientReduction(buckets, rules)
    for step in range(2):
        for batch in range(BATCHES):
            reduction.begin_pass(last=batch == BATCHES - 1)
            unused = unused_in(group.rank, batch)
            x = inputs(group.rank, 10 * step + batch, dtype)
            loss(weights, x, unused).backward()
            if stage == 2:
                assert all(weight.grad is None for weight in weights), "freed in the pass"
            reduction.end_pass()
        parts = list(reduction.finish())
        assert all(weight.grad is None for weight in weights)
        expected = average(weights, group, stage, form, step)
        for bucket, numbers, grads in zip(buckets, LAYOUTS[layout], parts, strict=True):
            whole = torch.zeros(bucket.length, dtype=sums or dtype)
            for number, start in zip(numbers, bucket.params.values(), strict=True):
                whole[start : start + SIZES[number]] = expected[number]
            length = bucket.length // group.size
            mine = whole[group.rank * length : (group.rank + 1) * length]
            part = grads.flat_partition  # type: ignore[attr-defined]
            torch.testing.assert_close(part, mine, rtol=0, atol=0)
            assert torch.equal(torch.cat([grad.reshape(-1) for grad in grads]), part)
            kept = [n for n in grads if not getattr(n, "_zero_padding", False)]
            assert sum(map(len, kept)) <= sum(p.numel() for p in bucket.params)
    reduction.close()


CASES = [
    (size, stage, form, layout)
    for size in (2, 3)
    for stage in (1, 2)
    for form in FORMS
    for layout in LAYOUTS
]
SAMPLE = {(3, 1, "bf16, sums in fp32", "two"), (2, 2, "bf16, sums in fp32", "each")}


@pytest.mark.parametrize(("size", "stage", "form", "layout"), sampled(CASES, SAMPLE.__contains__))
def test_parts_are_those_of_the_average(pool, size, stage, form, layout):
    """Bit for bit: sums over ranks have one order. One weight has no gradient in one pass."""
    pool.run(size, reduced, stage, form, layout, True, True)


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 2])
def test_neither_overlap_nor_scatter_changes_anything(pool, stage):
    for overlapped, scatters in ((False, True), (True, False)):
        pool.run(2, reduced, stage, "fp32", "two", overlapped, scatters)


def in_backward(stage: int) -> tuple[list[list[int]], int]:
    """Which buckets have left when a weight's gradient comes, and bytes sent; for the pool."""
    group = tensor_group()
    weights = weights_of(torch.float32)
    reduction = GradientReduction(
        buckets_of(weights, LAYOUTS["each"], group), ReductionRules(stage == 2, group.size)
    )
    sent: list[int] = []

    def counted(flat: Tensor, group: Group, scatters: bool) -> object:
        sent.append(flat.numel())
        return start_reduction(flat, group, scatters)

    seen: list[list[int]] = []
    weights[0].register_hook(lambda grad: seen.append([*sent]))
    with mock.patch("megatron.engine.update.reduction.start_reduction", counted):
        for batch in range(3):
            reduction.begin_pass(last=batch == 2)
            x = inputs(group.rank, batch, torch.float32)
            loss(weights, x, None).backward()
            reduction.end_pass()
        list(reduction.finish())
    return seen, sum(sent)


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_leave_within_the_backward_pass(pool, stage):
    """In the last pass at stage 1, in each at stage 2, before the first weight's gradient."""
    seen, sent = pool.run(2, in_backward, stage)[0]
    lengths = [-(-size // 4) * 4 for size in SIZES]
    assert sent == sum(lengths) * (3 if stage == 2 else 1)
    assert len(seen[-1]) >= len(SIZES) - 1, seen
    assert len(seen[0]) == (0 if stage == 1 else len(SIZES) - 1)


def passes(stage: int) -> tuple[list[Tensor], int]:
    """Two stages of a pipeline on a rank, with a weight in common: the averages, and how often
    buckets were sent; for the pool."""
    group = tensor_group()
    weights = weights_of(torch.float32)
    of_stage = {0: weights[:2] + weights[4:], 1: weights[2:]}
    buckets = [
        Bucket({p: 0}, padded([p], group.size), group,
               passes=[name for name, params in of_stage.items() if p in set(params)])
        for p in reversed(weights)
    ]  # fmt: skip
    reduction = GradientReduction(buckets, ReductionRules(stage == 2, group.size))
    with mock.patch(
        "megatron.engine.update.reduction.start_reduction", wraps=start_reduction
    ) as sent:
        for name, batch, last in ((1, 0, False), (1, 1, True), (0, 0, False), (0, 1, True)):
            reduction.begin_pass(last, name)
            x = inputs(group.rank, 10 * name + batch, torch.float32)
            loss(of_stage[name], x, None).backward()
            reduction.end_pass()
        parts = [grads.flat_partition for grads in reduction.finish()]  # type: ignore[attr-defined]
    wholes = [torch.empty(bucket.length) for bucket in buckets]
    for whole, part in zip(wholes, parts, strict=True):
        dist.all_gather(list(whole.chunk(group.size)), part)
    return wholes[::-1], sent.call_count


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_waits_for_all_passes_with_its_gradients(pool, stage):
    """At stage 1 each is sent once."""
    found, sent = pool.run(2, passes, stage)[0]
    assert sent == len(SIZES) or stage == 2
    weights = weights_of(torch.float32)
    for name, params in ((1, weights[2:]), (0, weights[:2] + weights[4:])):
        for rank in range(2):
            for batch in range(2):
                (loss(params, inputs(rank, 10 * name + batch, torch.float32), None) / 2).backward()
    for weight, whole in zip(weights, found, strict=True):
        torch.testing.assert_close(whole[: weight.numel()], weight.grad, rtol=1e-5, atol=1e-6)


def test_one_replica_keeps_gradients_where_they_are():
    weights = weights_of(torch.float32)
    reduction = GradientReduction(
        buckets_of(weights, LAYOUTS["two"], SINGLE), ReductionRules(False, 2)
    )
    loss(weights, inputs(0, 0, torch.float32), None).backward()
    grads = [weight.grad for weight in weights]
    first, second = reduction.finish()
    assert [id(g) for g in (*first, *second)] == [id(grads[n]) for n in (3, 4, 0, 1, 2)]


def test_a_gradient_that_comes_again_is_an_error():
    weights = weights_of(torch.bfloat16)
    reduction = GradientReduction(
        buckets_of(weights, LAYOUTS["each"], SINGLE),
        ReductionRules(False, 1, sums=torch.float32),
    )
    reduction.begin_pass(last=True)
    weights[4].sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        weights[4].sum().backward()


def forgotten(stage: int) -> None:
    """A step that is dropped before, within and after its passes, and then taken again; for the
    pool."""
    group = tensor_group()
    results = []
    for dropped in (0, 1, 2):
        weights = weights_of(torch.float32)
        buckets = buckets_of(weights, LAYOUTS["two"], group)
        reduction = GradientReduction(buckets, ReductionRules(stage == 2, group.size))
        for passes in (dropped, 2):
            reduction.drop()
            for batch in range(passes):
                reduction.begin_pass(last=batch == 1)
                loss(weights, inputs(group.rank, batch, torch.float32), None).backward()
                reduction.end_pass()
        results.append([grads.flat_partition for grads in reduction.finish()])  # type: ignore[attr-defined]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_dropped_step_leaves_nothing(pool, stage):
    pool.run(2, forgotten, stage)
