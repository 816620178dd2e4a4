"""The memory of keys and values: pages of equal size, the same in all blocks of a process.

pages = floor(bytes of a rank / bytes of its page), the fewest of all ranks, at most those of
``MOST_SEQUENCES`` sequences of the model's longest length; a page of P positions takes
2 x blocks of the rank x key and value heads of the rank x P x width of a head x bytes of a number;
of a model that retrieves also that of `execution.neighbor_memory.NeighborShape`.

Shapes: X pages, K key and value heads, P positions of a page, D head width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import ConfigError
from megatron.config.flags import POSITIVE, option
from megatron.parallel.mesh import Group

MOST_SEQUENCES = 256  # of the longest length; more memory is of no use


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
            where = f"the free memory ({room / 2**30:.3g} GiB for keys and values)"
            if self.kv_cache_gib is not None:
                where = f"--kv-cache-gib {self.kv_cache_gib:g}"
            raise ConfigError(
                f"{where} has room for {int(pages)} pages of {shape.positions} "
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


@dataclass(frozen=True)
class ServedConfig(CacheConfig):
    """Keys and values, and the adapters of the model."""

    adapter: tuple[str, ...] = option((), aliases=("--lora-modules",))
    """Adapters on the model of --load, as NAME=FOLDER: folders of peft, or checkpoints of runs with
    --lora."""


@dataclass(frozen=True)
class PageShape:
    """Contents of a page on one rank: keys and values of ``positions`` positions in ``blocks``
    blocks with ``heads`` key and value heads of ``width`` channels each, and ``others``, further
    bytes."""

    blocks: int
    heads: int
    positions: int
    width: int
    dtype: torch.dtype
    others: int = 0

    @property
    def bytes(self) -> int:
        """2 x blocks x heads x positions x width x bytes of a number, and others."""
        numbers = 2 * self.blocks * self.heads * self.positions * self.width
        return numbers * self.dtype.itemsize + self.others


class PageMemory:
    """All pages of a process, [blocks, 2, X, K, P, D] with keys first, for the blocks with the
    numbers ``layers``. A CPU's memory is taken from the system when a page is first used."""

    def __init__(
        self, layers: Sequence[int], shape: PageShape, pages: int, device: torch.device
    ) -> None:
        assert len(layers) == shape.blocks
        self.shape, self.pages = shape, pages
        self.places = {layer: place for place, layer in enumerate(layers)}
        size = (shape.blocks, 2, pages, shape.heads, shape.positions, shape.width)
        self.pool = torch.empty(size, dtype=shape.dtype, device=device)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, [X, K, P, D] each."""
        keys, values = self.pool[self.places[layer]]
        return keys, values

    def clear(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros: unwritten positions are multiplied by a probability of zero, and
        must be finite."""
        for page in pages:
            self.pool[:, :, page] = 0.0

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(from, to), in order."""
        for source, target in copies:
            self.pool[:, :, target] = self.pool[:, :, source]
