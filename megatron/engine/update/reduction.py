"""Gradients to the ranks that update them, in buckets, within the backward pass (ZeRO 1 and 2).

A bucket is a group of parameters in one flat tensor, of which every replica updates an equal part
(Rajbhandari et al. 2020, arXiv:1910.02054). As soon as the last gradient of a bucket has come, its
reduce-scatter starts. At stage 1 gradients of micro batches are added first, and the bucket leaves
in the last one. At stage 2 it leaves in every micro batch, and the parts are added. Buckets leave
in one order on all replicas, each after those before it. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import eq
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.kernels.sums import GradientSum
from megatron.parallel.collectives import Finish, reduce_scatter_flat
from megatron.parallel.mesh import Group

MOST_TRAVELLING = 2
"""Number of buckets that may be under way: what has arrived frees the memory of its bucket."""


class ReductionRules(NamedTuple):
    """Rules of the sums of gradients.

    Attributes:
        each_pass: reduce in every backward pass (stage 2), not in the last one only.
        overlapped: start reductions within backward passes, not after them.
        scatters: use reduce-scatter, not all-reduce (``reduce_scatter`` of the JSON).
        sums: dtype of sums over micro batches; None for that of the gradients.
        wire: dtype in which gradients travel; None for that of the sums or gradients.
        first: divide before the sum over replicas, not after it, as DeepSpeed does.
        replicas: number of replicas of dense layers, over which gradients are averaged.
    """

    each_pass: bool
    replicas: int
    overlapped: bool = True
    scatters: bool = True
    sums: torch.dtype | None = None
    wire: torch.dtype | None = None
    first: bool = False


class Bucket:
    """Parameters that are reduced together.

    Args:
        params: with the place of each in the flat tensor of ``length`` elements.
        group: the ranks that share the bucket, each with an equal part of it.
        tied: torch's group of the pipeline stages with a copy of these parameters, over which
            their gradients are summed too; None without.
        passes: names of the backward passes with gradients of these parameters; empty for all.

    Attributes:
        flat: gradients of this process, until they leave; None without.
        part: the average of this rank's part, in the dtype of the sums.
        missing: parameters whose gradients have not come in the current pass.
        left: whether it has left in the current pass.
        awaited: passes whose last one of the step has not begun.
    """

    def __init__(
        self,
        params: Mapping[nn.Parameter, int],
        length: int,
        group: Group,
        tied: dist.ProcessGroup | None = None,
        passes: Iterable[Hashable] = (),
    ) -> None:
        self.params, self.length, self.group = dict(params), length, group
        self.tied, self.passes = tied, frozenset(passes)
        self.flat: Tensor | None = None
        self.part: Tensor | None = None
        self.missing: set[nn.Parameter] = set()
        self.left, self.awaited = False, set(self.passes)
        self._views: dict[nn.Parameter, Tensor] = {}
        self._filled: set[nn.Parameter] = set()

    def in_place(self, rules: ReductionRules) -> bool:
        """True if gradients stay where autograd has them: there are no replicas to sum over."""
        dtype = next(iter(self.params)).dtype
        alone = self.group.size == 1 and self.tied is None
        starts = accumulate((param.numel() for param in self.params), initial=0)
        return alone and rules.sums in (None, dtype) and all(map(eq, self.params.values(), starts))

    def add(self, param: nn.Parameter, dtype: torch.dtype | None, kept: bool) -> None:
        """Take the gradient of a parameter from it into the flat tensor, of ``dtype``; ``kept``:
        autograd adds the next one there, if its dtype is that."""
        grad = param.grad
        if grad is None:
            return
        if self.flat is None:
            self.flat = torch.empty(self.length, dtype=dtype or grad.dtype, device=grad.device)
            self._views = {
                each: self.flat[start : start + each.numel()].view(each.shape)
                for each, start in self.params.items()
            }
        view = self._views[param]
        if grad is not view:
            if param in self._filled:
                view.add_(grad)
            else:
                view.copy_(grad)
                self._filled.add(param)
        param.grad = view if kept and view.dtype == grad.dtype else None

    def total(self, param: nn.Parameter) -> Tensor | None:
        """Return the sum of a parameter's gradients so far; None before the first."""
        if param.grad is not None:
            return param.grad
        return self._views[param] if param in self._filled else None

    def leave(self) -> Tensor | None:
        """Return the flat gradients, zeros where a parameter has none, and forget them."""
        flat = self.flat
        if flat is not None:
            edges = [(start, start + param.numel()) for param, start in self.params.items()
                     if param in self._filled]  # fmt: skip
            for (_, end), (start, _) in pairwise([(0, 0), *edges, (self.length, self.length)]):
                if end < start:
                    flat[end:start].zero_()
        self.flat, self._views = None, {}
        self._filled.clear()
        return flat


class GradientViews(list[Tensor]):
    """The gradients of a rank's part of a bucket, by parameter, as DeepSpeed's optimizer keeps
    them: views of ``flat_partition``, those between and after them marked as padding."""

    def __init__(self, bucket: Bucket, part: Tensor) -> None:
        self.flat_partition = part
        first = bucket.group.rank * part.numel()
        place = 0
        for param, start in bucket.params.items():
            begin, end = max(0, start - first), min(part.numel(), start + param.numel() - first)
            if begin < end:
                self._pad(place, begin)
                self.append(part[begin:end])
                place = end
        self._pad(place, part.numel())

    def _pad(self, start: int, end: int) -> None:
        if start < end:
            padding = self.flat_partition[start:end]
            padding._zero_padding = True  # type: ignore[attr-defined]
            self.append(padding)


class GradientReduction:
    """The gradients of a model's buckets, which are given in the order in which they leave."""

    def __init__(self, buckets: Sequence[Bucket], rules: ReductionRules) -> None:
        self._rules, self._buckets = rules, list(buckets)
        self._sent = [bucket for bucket in self._buckets if not bucket.in_place(rules)]
        self._bucket_of = {param: bucket for bucket in self._sent for param in bucket.params}
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._came) for param in self._bucket_of
        ]
        self._travelling: deque[tuple[Bucket, Finish]] = deque()
        self._leaving: deque[Bucket] = deque()

    def sum_in_place(self) -> None:
        """Make gradients of matrices be added to their sums where they are computed, if there are
        sums over micro batches before the reduction."""
        for bucket in () if self._rules.each_pass else self._buckets:
            for param in bucket.params:
                if param.dim() == 2:
                    GradientSum(param, partial(bucket.total, param))

    def begin_pass(self, last: bool, name: Hashable = None) -> None:
        """Called before a backward pass; ``last``: it is the last one of its name in a step."""
        self._leaving.clear()
        for bucket in self._sent:
            if bucket.passes and name not in bucket.passes:
                continue
            bucket.left = False
            if last:
                bucket.awaited.discard(name)
            if self._rules.each_pass or (last and not bucket.awaited):
                bucket.missing = set(bucket.params)
                self._leaving.append(bucket)

    def end_pass(self) -> None:
        """Called after a backward pass that :meth:`begin_pass` has begun."""
        while self._leaving:
            self._send(self._leaving.popleft())
        if self._rules.each_pass:  # the first part of a later pass may come before it begins
            for bucket in self._sent:
                bucket.left = False

    @torch.no_grad()
    def _came(self, param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        bucket = self._bucket_of[param]
        if bucket.left:
            raise RuntimeError("a parameter has a second gradient after its bucket was reduced")
        bucket.add(param, self._flat_dtype, kept=not self._rules.each_pass)
        if self._leaving and self._rules.overlapped:
            bucket.missing.discard(param)
            while self._leaving and not self._leaving[0].missing:
                self._send(self._leaving.popleft())

    @property
    def _flat_dtype(self) -> torch.dtype | None:
        # At stage 2 the parts are added, so that only these need the dtype of sums.
        return None if self._rules.each_pass else self._rules.sums

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        bucket.left = True
        for param in bucket.params:  # what came without a hook
            bucket.add(param, self._flat_dtype, kept=False)
            param.grad = None
        flat = bucket.leave()
        if flat is None:  # every replica sends: its own gradients are zeros
            like = next(iter(bucket.params))
            flat = like.new_zeros(bucket.length, dtype=self._flat_dtype or like.dtype)
        if len(self._travelling) >= MOST_TRAVELLING:
            self._receive()
        flat = flat.to(self._rules.wire or flat.dtype)
        if self._rules.first:
            flat.div_(self._rules.replicas)
        self._travelling.append((bucket, start_reduction(flat, bucket.group, self._rules.scatters)))

    def _receive(self) -> None:
        bucket, finish = self._travelling.popleft()
        part = finish()
        if not self._rules.first and self._rules.replicas > 1:
            part.div_(self._rules.replicas)
        part = part.to(self._rules.sums or part.dtype)
        bucket.part = part if bucket.part is None else bucket.part.add_(part)

    @torch.no_grad()
    def finish(self) -> Iterator[Sequence[Tensor]]:
        """Return the averaged gradients of this rank's part of each bucket, in the order of
        ``buckets``; called after the last pass of a step."""
        self.end_pass()
        while self._travelling:
            self._receive()
        for bucket in self._buckets:
            if bucket.tied is not None:
                # All copies have this part of the same bucket, so that they stay bitwise equal.
                dist.all_reduce(bucket.part, group=bucket.tied)
            if bucket.in_place(self._rules):
                yield self._own_gradients(bucket)
            else:
                assert bucket.part is not None
                yield GradientViews(bucket, bucket.part)
            self._renew(bucket)

    def _renew(self, bucket: Bucket) -> None:
        bucket.part, bucket.left, bucket.awaited = None, False, set(bucket.passes)

    def _own_gradients(self, bucket: Bucket) -> list[Tensor]:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.params]
        if self._rules.replicas > 1:
            torch._foreach_div_(grads, self._rules.replicas)
        return grads

    def drop(self) -> None:
        """Forget the gradients of a step, finished or not."""
        self._leaving.clear()
        while self._travelling:
            self._receive()
        for bucket in self._buckets:
            bucket.leave()
            self._renew(bucket)
            for param in bucket.params:
                param.grad = None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def start_reduction(flat: Tensor, group: Group, scatters: bool = True) -> Finish:
    """Sum ``flat`` over the ranks, in rank order over gloo, for this rank's part of it. Its memory
    may be overwritten."""
    if group.size == 1:
        return lambda: flat
    parts = flat.view(group.size, -1)
    if not scatters:
        work = dist.all_reduce(flat, group=group.handle, async_op=True)
        return _after(work, lambda: parts[group.rank].clone())
    if dist.get_backend(group.handle) == dist.Backend.GLOO:
        # Its reduce-scatter is an all-reduce: twice the bytes, and more than twice the work.
        others = torch.empty_like(parts)
        work = dist.all_to_all_single(others, parts, group=group.handle, async_op=True)
        return _after(work, lambda: _sum_in_order(others), keeps=flat)
    part = flat.new_empty(parts.shape[1])
    work = reduce_scatter_flat(part, flat, group=group.handle, async_op=True)
    return _after(work, lambda: part, keeps=flat)


def _after(work: dist.Work, result: Callable[[], Tensor], keeps: Tensor | None = None) -> Finish:
    def finish() -> Tensor:
        nonlocal keeps
        work.wait()
        keeps = None  # the collective has read it
        return result()

    return finish


def _sum_in_order(parts: Tensor) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
