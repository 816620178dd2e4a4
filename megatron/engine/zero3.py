"""Partitioned parameters: where ZeRO stage 3 keeps a rank's part of each."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.parallel.groups import Group


def partition_range(param: nn.Parameter, data: Group) -> tuple[int, int]:
    """Where this rank's partition lies in a flattened parameter at ZeRO stage 3: [start, end)."""
    size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start = min(data.rank * size, param.ds_numel)  # type: ignore[attr-defined]
    return start, min(start + size, param.ds_numel)  # type: ignore[attr-defined]


def set_partition(param: nn.Parameter, data: Group, share: Tensor) -> None:
    """Fills this rank's partition of a parameter at ZeRO stage 3 from the whole local share."""
    start, end = partition_range(param, data)
    own = param.ds_tensor.data  # type: ignore[attr-defined]
    own[: end - start].copy_(share.reshape(-1)[start:end])
    # hpZ keeps a second copy from an earlier partitioning; without it DeepSpeed makes a new one.
    param.ds_secondary_tensor = None  # type: ignore[attr-defined]
