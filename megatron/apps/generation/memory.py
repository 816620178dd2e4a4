"""The memory of generation: pages of keys and values or of latents, of equal size, with the same
numbers in all blocks of a process; and places for the states of texts.

pages = floor(bytes of a rank / bytes of its page), the fewest of all ranks, at most those of
``MOST_SEQUENCES`` sequences of the model's longest length; a page of P positions takes
2 x key and value heads of the rank x P x width of a head x bytes of a number in each block with
keys and values, and P x width x bytes in each block with latents; of a model that retrieves also
that of `execution.neighbor_memory.NeighborShape`.

In blocks with states a text takes a slot, of 4 bytes a number (8 in float64), whatever its length:
slots = floor(bytes of a rank / bytes of its slot), the fewest of all ranks, at most as many texts
as run at once. Where there are pages too, slots take at most half of the memory.

Shapes: X pages, K key and value heads, P positions of a page, D head width.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import ConfigError, ModelConfig
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, option
from megatron.config.sections import States, TokenMemory, memory_of
from megatron.parallel.mesh import Group

MOST_SEQUENCES = 256  # of the longest length; more memory is useless
TEXTS = 64
"""Default number of texts that run concurrently."""


@dataclass(frozen=True)
class CacheConfig:
    """Memory for keys and values, latents and states."""

    kv_cache_gib: float | None = option(None, derived="--kv-cache-fraction", bounds=POSITIVE)
    """GiB of memory of each rank for keys and values."""
    kv_cache_fraction: float | None = option(None, derived="CPU: 0.4; GPU: 0.85", bounds=POSITIVE)
    """Share for keys and values of the memory that is free once the model is loaded."""

    @property
    def texts(self) -> int:
        """Texts that run at once."""
        return TEXTS

    def pages(
        self,
        shape: PageShape,
        max_positions: int,
        device: torch.device,
        world: Group,
        taken: int = 0,
    ) -> int:
        """Pages of every rank, where states have ``taken`` some bytes of this one; all ranks must
        call it. Raises ConfigError if they are too few for the model's longest sequence."""
        room = self._bytes(device) - taken
        needed = -(-max_positions // shape.positions)
        pages = MOST_SEQUENCES * needed
        if shape.bytes:  # a rank of a pipeline may have an encoder's only
            pages = min(pages, max(0, int(room // shape.bytes)))
        pages = _fewest(pages, device, world)
        if pages < needed:
            least = (needed * shape.bytes + taken) / 2**30
            raise ConfigError(
                f"{self._named(room)} has room for {pages} pages of {shape.positions} "
                f"positions, and the longest sequence of the model, {max_positions:,} positions, "
                f"needs {needed}: give --kv-cache-gib {least:.3g} or more"
            )
        return pages

    def slots(
        self, states: StateShape, pages: PageShape, device: torch.device, world: Group
    ) -> int:
        """Slots of every rank, next to pages of this shape; all ranks must call it. Raises
        ConfigError if there is room for none."""
        share = 2 if pages.bytes else 1
        room, slots = self._bytes(device), self.texts
        if states.bytes:  # a rank of a pipeline may have other blocks only
            slots = min(slots, int(room / share // states.bytes))
        slots = _fewest(slots, device, world)
        if not slots:
            least = share * states.bytes / 2**30
            raise ConfigError(
                f"{self._named(room)} has no room for the states of one text, "
                f"{states.bytes:,} bytes"
                + ", next to its keys and values" * bool(pages.bytes)
                + f": give --kv-cache-gib {least:.3g} or more"
            )
        return slots

    def _named(self, room: float) -> str:
        if self.kv_cache_gib is not None:
            return f"--kv-cache-gib {self.kv_cache_gib:g}"
        return f"the free memory ({room / 2**30:.3g} GiB for keys and values)"

    def drafts(self, model: ModelConfig) -> int:
        """Tokens that the model's own blocks draft in a step. Raises ConfigError if it cannot do
        what flags say."""
        return 0

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
    """Keys and values, the adapters of the model, and tokens that are drafted."""

    adapter: tuple[str, ...] = option((), aliases=("--lora-modules",))
    """Adapters on the model of --load, as NAME=FOLDER: folders of peft, or checkpoints of runs with
    --lora."""
    num_speculative_tokens: int = option(0, bounds=NOT_NEGATIVE)
    """Tokens of each text that are drafted and computed in the step of the token before them. The
    text is the same to the last bit; it takes fewer steps where drafts are right. 0 for none."""
    speculative_method: str | None = option(
        None,
        choices=("mtp", "ngram"),
        derived="mtp for a model with --mtp-num-layers, else ngram",
    )
    """Source of drafts: the model's multi-token prediction blocks, or the continuation of the
    latest tokens' previous occurrence in the text."""

    def drafts(self, model: ModelConfig) -> int:
        count, method = self.num_speculative_tokens, self.speculative_method
        if not count:
            if method is not None:
                raise ConfigError(
                    f"--speculative-method {method} needs --num-speculative-tokens: how many "
                    "tokens are drafted"
                )
            return 0
        states = [n for n in range(model.num_layers) if isinstance(memory_of(model, n), States)]
        if states:
            raise ConfigError(
                f"--num-speculative-tokens {count}: block {states[0]} of the model has a recurrent "
                "state, which cannot return to that before a wrong draft; leave it out"
            )
        if method == "mtp" and not model.blocks_ahead:
            raise ConfigError(
                "--speculative-method mtp: the model has no blocks of multi-token prediction "
                "(--mtp-num-layers); give ngram"
            )
        return 0 if method == "ngram" or not model.blocks_ahead else count


def _fewest(count: int, device: torch.device, world: Group) -> int:
    """The least number of all ranks."""
    if world.size == 1:
        return count
    counts = torch.tensor(count, device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=world.handle)
    return int(counts)


@dataclass(frozen=True)
class PageShape:
    """Contents of a page on one rank: ``positions`` positions of ``layers``, the blocks with keys
    and values or latents by number, and ``others``, further bytes."""

    layers: Mapping[int, TokenMemory]
    positions: int
    dtype: torch.dtype
    others: int = 0

    @property
    def bytes(self) -> int:
        """Positions x bytes of a number x, for each block, 2 x heads x width of keys and values or
        width of latents; and others."""
        numbers = sum(each.tensors * each.heads * each.width for each in self.layers.values())
        return self.positions * numbers * self.dtype.itemsize + self.others


@dataclass(frozen=True)
class StateShape:
    """States of a text on one rank, of the blocks ``layers`` by number."""

    layers: Mapping[int, States]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a slot."""
        return sum(states.numbers for states in self.layers.values()) * self.dtype.itemsize


class PageMemory:
    """All pages of a process: of blocks that keep the same together, ``pools`` of
    [blocks, 2, X, K, P, D] with keys first, or [blocks, 1, X, 1, P, W] of latents. A CPU's memory
    is taken from the system when a page is first used."""

    def __init__(self, shape: PageShape, pages: int, device: torch.device) -> None:
        self.shape, self.pages, self.device = shape, pages, device
        self.pools: list[Tensor] = []
        self._of: dict[int, Tensor] = {}
        for kind in dict.fromkeys(shape.layers.values()):
            layers = [layer for layer, each in shape.layers.items() if each == kind]
            size = (len(layers), kind.tensors, pages, kind.heads, shape.positions, kind.width)
            pool = torch.empty(size, dtype=shape.dtype, device=device)
            self.pools.append(pool)
            self._of |= zip(layers, pool, strict=True)

    def of(self, layer: int) -> Tensor:
        """Keys and values [2, X, K, P, D] of a block, or its latents [1, X, 1, P, W]."""
        return self._of[layer]

    def clear(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros: unwritten positions are multiplied by a probability of zero, and
        must be finite."""
        for pool in self.pools:
            for page in pages:
                pool[:, :, page] = 0.0

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(from, to), in order."""
        for pool in self.pools:
            for source, target in copies:
                pool[:, :, target] = pool[:, :, source]


class StateMemory:
    """The states of all slots of a process; a tensor [slots, ...] for each state of a block. A
    CPU's memory is taken from the system when a slot is first used."""

    def __init__(self, shape: StateShape, slots: int, device: torch.device) -> None:
        self.shape, self.slots, self.device = shape, slots, device
        self._of = {
            layer: tuple(
                torch.empty((slots, *each), dtype=shape.dtype, device=device)
                for each in states.shapes
            )
            for layer, states in shape.layers.items()
        }

    def of(self, layer: int) -> tuple[Tensor, ...]:
        """The states of a block, [slots, ...] each."""
        return self._of[layer]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(from, to), in order."""
        for source, target in copies:
            for pools in self._of.values():
                for pool in pools:
                    pool[target] = pool[source]
