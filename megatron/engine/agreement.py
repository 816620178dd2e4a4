"""Ranks agree on what happens next."""

from __future__ import annotations

import torch
import torch.distributed as dist


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is true on any rank; every rank must call it."""
    return max_over_ranks(float(flag), device) > 0


def max_over_ranks(value: float, device: torch.device) -> float:
    """The largest ``value`` of all ranks; every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)
