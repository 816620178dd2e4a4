"""Reduces gradients to the ranks that update them, during the backward pass (ZeRO 1 and 2).

A bucket is a group of parameters in one flat tensor, of which every replica updates an equal shard
(Rajbhandari et al. 2020, arXiv:1910.02054). The reduce-scatter of a bucket starts when its last
gradient is ready. At stage 1 the gradients of micro batches are added first, and the last micro
batch sends the bucket. At stage 2 every micro batch sends it, and the reduced shards are added. All
replicas send buckets in the same order. Nothing in this module waits for the device.
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
"""Maximum number of buckets in transit. Receiving the oldest one frees its memory."""


class ReductionRules(NamedTuple):
    """Settings for the gradient reduction.

    Attributes:
        each_pass: reduce in every backward pass (stage 2) instead of only in the last one.
        overlapped: start reductions during backward passes instead of after them.
        scatters: use reduce-scatter instead of all-reduce (``reduce_scatter`` of the JSON).
        sums: dtype of sums over micro batches; None for the gradients' dtype.
        wire: dtype for communication; None for the dtype of the sums or gradients.
        first: divide before the sum over replicas instead of after it, as DeepSpeed does.
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
    """Parameters whose gradients are reduced together.

    Args:
        params: parameters with their offsets in the flat tensor of ``length`` elements.
        group: ranks that share the bucket, each of which updates an equal shard.
        tied: torch's process group of the pipeline stages with a copy of these parameters, over
            which their gradients are also summed; None for untied parameters.
        passes: names of the backward passes with gradients of these parameters; empty for all.

    Attributes:
        flat: gradients of this process until they are sent; None before the first one.
        part: averaged gradients of this rank's shard, in the dtype of the sums.
        missing: parameters whose gradients are not ready yet in the current pass.
        left: whether the bucket was sent in the current pass.
        awaited: passes whose last run in this step has not begun.
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
        """Return whether gradients stay in place, since there are no replicas to sum over."""
        dtype = next(iter(self.params)).dtype
        alone = self.group.size == 1 and self.tied is None
        starts = accumulate((param.numel() for param in self.params), initial=0)
        return alone and rules.sums in (None, dtype) and all(map(eq, self.params.values(), starts))

    def add(self, param: nn.Parameter, dtype: torch.dtype | None, kept: bool) -> None:
        """Add a parameter's gradient to the flat tensor, which is created with ``dtype`` or the
        gradient's. With ``kept``, autograd adds the next gradient there if dtypes are equal."""
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
        """Return the sum of a parameter's gradients so far; None before the first gradient."""
        if param.grad is not None:
            return param.grad
        return self._views[param] if param in self._filled else None

    def leave(self) -> Tensor | None:
        """Return the flat gradients, with zeros for missing ones, and forget them."""
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
    """Gradients of a rank's shard of a bucket, by parameter, as DeepSpeed's optimizer keeps them.
    They are views of ``flat_partition``; gaps between and after them are marked as padding."""

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
    """Reduces the gradients of a model's buckets. Buckets are sent in the given order."""

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
        """Accumulate gradients of matrices where they are computed, if gradients are summed over
        micro batches before the reduction."""
        for bucket in () if self._rules.each_pass else self._buckets:
            for param in bucket.params:
                if param.dim() == 2:
                    GradientSum(param, partial(bucket.total, param))

    def begin_pass(self, last: bool, name: Hashable = None) -> None:
        """Prepare a backward pass. ``last`` tells whether it is the step's last with this name."""
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
        """Send the remaining buckets. Called after the pass that :meth:`begin_pass` began."""
        while self._leaving:
            self._send(self._leaving.popleft())
        if self._rules.each_pass:  # gradients of a later pass can be ready before it begins
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
        # At stage 2 only the sums of reduced shards need the dtype of sums.
        return None if self._rules.each_pass else self._rules.sums

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        bucket.left = True
        for param in bucket.params:  # gradients that came without a hook
            bucket.add(param, self._flat_dtype, kept=False)
            param.grad = None
        flat = bucket.leave()
        if flat is None:  # send zeros, since every replica takes part
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
        """Yield the averaged gradients of this rank's shard of each bucket, in the buckets' order.
        Called after a step's last pass."""
        self.end_pass()
        while self._travelling:
            self._receive()
        for bucket in self._buckets:
            if bucket.tied is not None:
                # All copies have the same shard in their bucket, so they stay bitwise equal.
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
        """Discard a step's gradients, whether or not they are reduced."""
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
    """Start to sum ``flat`` over the ranks; the returned function waits for this rank's shard. With
    gloo, addends are summed in rank order. The memory of ``flat`` may be overwritten."""
    if group.size == 1:
        return lambda: flat
    parts = flat.view(group.size, -1)
    if not scatters:
        work = dist.all_reduce(flat, group=group.handle, async_op=True)
        return _after(work, lambda: parts[group.rank].clone())
    if dist.get_backend(group.handle) == dist.Backend.GLOO:
        # gloo's reduce-scatter is an all-reduce, with twice the bytes and more than twice the work.
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
