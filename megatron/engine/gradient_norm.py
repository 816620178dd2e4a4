"""Global gradient norm and clipping, from the shard descriptions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.groups import Group
from megatron.parallel.shard import shard_of


@torch.no_grad()
def gradient_norm(params: Iterable[nn.Parameter], group: Group) -> Tensor:
    """2-norm over all gradients of the whole model, each counted once (float32, or float64 for
    float64 gradients).

    Args:
        params: this rank's parameters, gradients averaged over data-parallel ranks.
        group: the tensor-parallel group; parameters that are not cut are counted on its first
            rank only.
    """
    squares = [
        param.grad.to(torch.promote_types(param.grad.dtype, torch.float32)).pow(2).sum()
        for param in params
        if param.grad is not None and (shard_of(param).dim is not None or group.rank == 0)
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if group.size > 1:
        dist.all_reduce(total, group=group.handle)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(params: Iterable[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scales all gradients by largest / norm if the norm is above ``largest``."""
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            param.grad.mul_(scale)
