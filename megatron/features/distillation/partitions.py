"""Partitioning of a teacher's weights over the ranks that would otherwise have copies of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.mesh import Group, Mesh
from megatron.parallel.shard import shard_of


def partition_blocks(blocks: Iterable[nn.Module], mesh: Mesh) -> None:
    """Partition the weights of blocks over their replicas. Each rank keeps one partition, and has
    all of a block's weights only while the block runs. Running a block is collective."""
    for block in blocks:
        by_group: dict[Group, list[nn.Parameter]] = {}
        for param in block.parameters():
            by_group.setdefault(mesh.replicas(shard_of(param)), []).append(param)
        for group, params in by_group.items():
            _Partitioned(block, params, group)


class _Partitioned:
    """Weights of a block that have the same replicas, concatenated into a flat tensor. ``own`` is
    this rank's partition."""

    def __init__(self, block: nn.Module, params: list[nn.Parameter], data: Group) -> None:
        self._params, self._data = params, data
        self._shapes = [param.shape for param in self._params]
        with torch.no_grad():
            flat = torch.cat([param.view(-1) for param in self._params])
            share = -(-len(flat) // data.size)
            padded = nn.functional.pad(flat, (0, share * data.size - len(flat)))
            self.own = padded[data.rank * share :][:share].clone()
        self._free()
        block.register_forward_pre_hook(self._gather)
        block.register_forward_hook(self._free)

    def _gather(self, *_: Any) -> None:
        whole = self.own.new_empty(len(self.own) * self._data.size)
        dist.all_gather(list(whole.chunk(self._data.size)), self.own, group=self._data.handle)
        start = 0
        for param, shape in zip(self._params, self._shapes, strict=True):
            param.data = whole[start : start + shape.numel()].view(shape)
            start += shape.numel()

    def _free(self, *_: Any) -> Tensor | None:
        for param in self._params:
            param.data = self.own.new_empty(0)
        return None
