"""Gradients of which each tensor-parallel rank has an addend, summed once a step.

With sequence parallelism a rank applies norms, and what else is whole on every rank, to its slice
of the sequence, and norms of heads always to its own heads. Sums over ranks, over micro batches and
over replicas can be taken in any order: this one is the last, of what a rank keeps of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import start_all_reduce
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import sum_at_once, sum_later

_ALONE = 2**22
"""Minimum elements of a gradient that is sent directly instead of copied into a buffer."""


class SharedGradients:
    """The gradients of a model that are summed over tensor-parallel ranks.

    Args:
        params: all that are trained.
        gradients: what this rank keeps of the gradients of these parameters, after the last
            backward pass of a step, for each that has one; the same parts on every rank of
            ``group``, in the same order. They are written.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        gradients: Callable[[Sequence[nn.Parameter]], Iterable[Tensor]],
        group: Group,
    ) -> None:
        self._group, self._gradients = group, gradients
        self._params = sum_later(params) if group.size > 1 else []

    def sum_at_once(self) -> None:
        """From now on sum in every backward pass, for those who look at each."""
        sum_at_once(self._params)

    @torch.no_grad()
    def sum(self) -> None:
        """Sum what the backward passes of a step have left; every rank of the group calls it."""
        params = [param for param in self._params if param.summed_later]  # type: ignore[attr-defined]
        if not params:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in self._gradients(params):
            if grad.numel() < _ALONE or not grad.is_contiguous():
                by_dtype.setdefault(grad.dtype, []).append(grad)
            else:
                start_all_reduce(grad, self._group)()
        for grads in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            total = start_all_reduce(flat, self._group)()
            parts = total.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])
