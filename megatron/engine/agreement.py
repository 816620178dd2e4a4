"""Ranks agree on what happens next."""

from __future__ import annotations

import torch
import torch.distributed as dist

Handle = dist.ProcessGroup | None
"""A group of torch.distributed; None for all ranks."""


def any_rank(flag: bool, device: torch.device, group: Handle = None) -> bool:
    """Whether ``flag`` is true on any rank; every rank must call it."""
    return max_over_ranks(float(flag), device, group) > 0


def max_over_ranks(value: float, device: torch.device, group: Handle = None) -> float:
    """The largest ``value`` of all ranks; every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return float(tensor)


def first_reason(reason: str | None, device: torch.device, group: Handle = None) -> str | None:
    """What the first rank says that gives a reason; None when none does. Every rank must call it.

    Args:
        reason: this rank's.
        device: where the group's collectives work.
        group: the ranks.
    """
    if not any_rank(reason is not None, device, group):
        return None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group=group)
    return next(f"rank {rank}: {said}" for rank, said in enumerate(reasons) if said is not None)
