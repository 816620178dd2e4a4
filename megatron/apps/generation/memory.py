"""How much memory keys and values get.

pages = floor(bytes of a rank / bytes of its page), the fewest of all ranks, at most those of
``MOST_SEQUENCES`` sequences of the model's longest length; a page of P positions takes
2 x blocks of the rank x key and value heads of the rank x P x width of a head x bytes of a number;
of a model that retrieves also what `execution.neighbor_memory.NeighborShape` says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from megatron.apps.generation.execution.page_memory import PageShape
from megatron.config import ConfigError
from megatron.config.flags import POSITIVE, option
from megatron.parallel.mesh import Group

MOST_SEQUENCES = 256
"""Sequences of the longest length after which more memory is of no use."""


@dataclass(frozen=True)
class CacheConfig:
    """Keys and values: how much memory they get."""

    kv_cache_gib: float | None = option(None, derived="--kv-cache-fraction", bounds=POSITIVE)
    """GiB of memory of each rank for keys and values."""
    kv_cache_fraction: float | None = option(None, derived="CPU: 0.4; GPU: 0.85", bounds=POSITIVE)
    """Share for keys and values of the memory that is free once the model is loaded."""

    def pages(
        self, shape: PageShape, max_positions: int, device: torch.device, world: Group
    ) -> int:
        """Pages of every rank; all ranks must call it. Raises ConfigError if they are too few for
        the model's longest sequence."""
        room = self._bytes(device)
        needed = -(-max_positions // shape.positions)
        pages = torch.tensor(MOST_SEQUENCES * needed)
        if shape.blocks:  # a rank of a pipeline may have an encoder's only
            pages = pages.clamp(max=int(room // shape.bytes))
        if world.size > 1:
            pages = pages.to(device)
            dist.all_reduce(pages, op=dist.ReduceOp.MIN, group=world.handle)
        if pages < needed:
            least = needed * shape.bytes / 2**30
            raise ConfigError(
                f"{self._shown(room)} has room for {int(pages)} pages of {shape.positions} "
                f"positions, and the longest sequence of the model, {max_positions:,} positions, "
                f"needs {needed}: give --kv-cache-gib {least:.3g} or more"
            )
        return int(pages)

    def _bytes(self, device: torch.device) -> float:
        if self.kv_cache_gib is not None and self.kv_cache_fraction is not None:
            raise ConfigError("--kv-cache-gib contradicts --kv-cache-fraction: give one of them")
        if self.kv_cache_fraction is not None and self.kv_cache_fraction > 1:
            raise ConfigError(f"--kv-cache-fraction {self.kv_cache_fraction} must be at most 1")
        if self.kv_cache_gib is not None:
            return self.kv_cache_gib * 2**30
        if device.type == "cpu":
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            return (self.kv_cache_fraction or 0.4) * psutil.virtual_memory().available / ranks
        free, _ = torch.cuda.mem_get_info(device)
        return (self.kv_cache_fraction or 0.85) * free

    def _shown(self, room: float) -> str:
        if self.kv_cache_gib is not None:
            return f"--kv-cache-gib {self.kv_cache_gib:g}"
        return f"the free memory ({room / 2**30:.3g} GiB for keys and values)"


@dataclass(frozen=True)
class ServedConfig(CacheConfig):
    """Keys and values, and the adapters of the model."""

    adapter: tuple[str, ...] = option((), aliases=("--lora-modules",))
    """Adapters on the model of --load, as NAME=FOLDER: folders of peft, or checkpoints of runs with
    --lora."""
