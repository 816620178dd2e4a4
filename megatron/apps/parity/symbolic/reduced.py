"""The trainer's own gradient reduction at ZeRO 1 and 2, without DeepSpeed's optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from megatron.engine.update.reduction import (
    Bucket,
    GradientReduction,
    GradientViews,
    ReductionRules,
)
from megatron.engine.update.zero_optimizer import ParameterUse, bucket_of
from megatron.parallel.collectives import all_gather_flat
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of


class ReducedGradients:
    """Gradients in a rank's buckets. Each bucket is reduced during the backward pass.

    Attributes:
        reduction: the trainer's reduction, which backward passes use.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        uses: Mapping[nn.Parameter, ParameterUse],
        mesh: Mesh,
        stage: int,
    ) -> None:
        # The weights that are used last get their gradients first.
        ordered = sorted(groups, key=lambda params: -min(uses[p].position for p in params))
        self._buckets = [_bucket(params, uses, mesh) for params in ordered]
        rules = ReductionRules(each_pass=stage == 2, replicas=mesh.dense.size)
        self.reduction = GradientReduction(self._buckets, rules)
        self._parts: list[Sequence[Tensor]] = []

    def finish(self) -> None:
        """Wait for this rank's partitions of all buckets, after a step's last backward pass."""
        self._parts = list(self.reduction.finish())

    def of(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return this rank's partitions of the gradients of ``params``, in order."""
        kept = dict(self._kept())
        return [kept[param] for param in params if param in kept]

    def _kept(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for bucket, grads in zip(self._buckets, self._parts, strict=True):
            length = bucket.length // bucket.group.size
            first = bucket.group.rank * length
            inside = (
                param
                for param, start in bucket.params.items()
                if start < first + length and start + param.numel() > first
            )
            views = (grad for grad in grads if not getattr(grad, "_zero_padding", False))
            yield from zip(inside, views, strict=True)

    @torch.no_grad()
    def spread(self) -> None:
        """All-gather the full gradient of every parameter into its ``grad``."""
        for bucket, grads in zip(self._buckets, self._parts, strict=True):
            if not isinstance(grads, GradientViews):
                for param, grad in zip(bucket.params, grads, strict=True):
                    param.grad = grad
                continue
            part = grads.flat_partition
            whole = part.new_empty(bucket.length)
            if bucket.group.size > 1:
                all_gather_flat(whole, part, group=bucket.group.handle)
            else:
                whole = part
            for param, start in bucket.params.items():
                param.grad = whole[start : start + param.numel()].view_as(param)


def _bucket(
    params: Sequence[nn.Parameter], uses: Mapping[nn.Parameter, ParameterUse], mesh: Mesh
) -> Bucket:
    """Return a group's bucket, padded like DeepSpeed's to a multiple of twice the rank count."""
    step = 2 * mesh.replicas(shard_of(params[0])).size
    length = -(-sum(param.numel() for param in params) // step) * step
    starts = accumulate((param.numel() for param in params), initial=0)
    return bucket_of(params, starts, length, uses, mesh)
