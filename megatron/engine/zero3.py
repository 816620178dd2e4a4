"""Partitioned parameters: where ZeRO stage 3 keeps a rank's part of each."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.parallel.mesh import Group


def partition_range(param: nn.Parameter, data: Group) -> tuple[int, int]:
    """Where this rank's partition lies in a flattened parameter at ZeRO stage 3: [start, end)."""
    size = param.ds_tensor.ds_numel  # type: ignore[attr-defined]
    start = min(data.rank * size, param.ds_numel)  # type: ignore[attr-defined]
    return start, min(start + size, param.ds_numel)  # type: ignore[attr-defined]


def set_partition(param: nn.Parameter, values: Tensor) -> None:
    """Fills this rank's partition of a parameter at ZeRO stage 3."""
    param.ds_tensor.data[: values.numel()].copy_(values)  # type: ignore[attr-defined]
    # hpZ keeps a second copy from an earlier partitioning; without it DeepSpeed makes a new one.
    param.ds_secondary_tensor = None  # type: ignore[attr-defined]
