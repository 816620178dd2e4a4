"""Global gradient norm and clipping, from the shard descriptions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.groups import Group


@torch.no_grad()
def gradient_norm(params: Iterable[nn.Parameter], group: Group) -> Tensor:
    """2-norm over all gradients of the whole model, each counted once (float32, or float64 for
    float64 gradients).

    Args:
        params: those of this rank whose copy counts, gradients averaged over data-parallel ranks.
        group: the ranks that hold one replica of the model.
    """
    squares = [
        param.grad.to(torch.promote_types(param.grad.dtype, torch.float32)).pow(2).sum()
        for param in params
        if param.grad is not None
    ]
    total = torch.stack(squares).sum()
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
