"""Global gradient norm and clipping, from the shard descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.mesh import Group

_ROW = 1024
"""Squares that are added up in float32 before float64 takes over, on CPUs."""

_ROWS = 256
"""Such rows that are worked on at a time."""


@torch.no_grad()
def gradient_norm(params: Iterable[nn.Parameter], group: Group) -> Tensor:
    """2-norm over all gradients of the whole model, each counted once (float32, or float64 for
    float64 gradients).

    Args:
        params: those of this rank whose copy counts, gradients averaged over data-parallel ranks.
        group: the ranks that hold one replica of the model.
    """
    grads = [param.grad for param in params if param.grad is not None]
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    return norm_of_groups([grads], wide, wide, [group], grads[0].device)


@torch.no_grad()
def norm_of_groups(
    grads: Sequence[Sequence[Tensor]],
    sums: torch.dtype,
    result: torch.dtype,
    groups: Sequence[Group],
    device: torch.device,
) -> Tensor:
    """2-norm over groups of gradients, of which no copy in another number format is made.

    Args:
        grads: gradients by parameter group; a group may be empty on some ranks.
        sums: in which a gradient's squares are added up.
        result: of the numbers that travel between ranks, and of the norm.
        groups: the ranks that each hold other gradients; sums are added over one after the other.
        device: of the gradients.

    Returns:
        A scalar. Not finite where any gradient is not.
    """
    squares_G = torch.stack([_sum_of_squares(part, sums, device) for part in grads]).to(result)
    for group in groups:
        if group.size > 1:
            dist.all_reduce(squares_G, group=group.handle)
    return torch.linalg.vector_norm(squares_G.sqrt())


def _sum_of_squares(grads: Sequence[Tensor], sums: torch.dtype, device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu" and sums == torch.float32:
        norms = torch.cat([part for grad in grads for part in _norms_of_rows(grad)])
    else:
        norms = torch.stack(torch._foreach_norm(list(grads), 2, dtype=sums))
    return norms.to(torch.float64).pow(2).sum()


def _norms_of_rows(grad: Tensor) -> list[Tensor]:
    """Torch adds the squares of a whole CPU tensor one after the other: in float32 a million of
    them lose four digits. A row at a time they lose none that matters, and float64 takes thrice
    the time."""
    flat = grad.reshape(-1)
    end = flat.numel() // _ROW * _ROW
    # Torch copies 16-bit numbers into float32 first: a part that stays in a core's cache.
    parts = [*flat[:end].view(-1, _ROW).split(_ROWS), flat[end:].view(1, -1)]
    return [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts if part.numel()
    ]


def clipping_factor(norm: Tensor, largest: float) -> Tensor:
    """What gradients are multiplied with so that their norm is at most ``largest``."""
    return (largest / (norm + 1e-6)).clamp(max=1.0)
