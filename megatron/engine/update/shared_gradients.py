"""Sums gradients over tensor-parallel ranks, once per step, if each rank has an addend.

With sequence parallelism a rank applies norms, and other layers that are replicated on every rank,
to its slice of the sequence. Norms of attention heads always apply to a rank's own heads. Sums over
ranks, micro batches and replicas can be taken in any order. This sum comes last, over the shard of
a gradient that a rank keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from megatron.parallel.collectives import start_all_reduce
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import sum_at_once, sum_later

_ALONE = 2**22
"""Minimum size in elements of a gradient that is reduced in place instead of via a buffer."""


class SharedGradients:
    """Gradients of a model that are summed over tensor-parallel ranks.

    Args:
        params: all trained parameters.
        gradients: returns the shards of these parameters' gradients that this rank keeps after a
            step's last backward pass. Every rank of ``group`` must return the same shards in the
            same order. They are modified in place.
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
        """From now on sum in every backward pass, for code that reads gradients after each pass."""
        sum_at_once(self._params)

    @torch.no_grad()
    def sum(self) -> None:
        """Sum a step's gradients. Collective: every rank of the group must call this."""
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
