"""Memory of generation: pages for keys and values or latents, and slots for recurrent states.

All pages have the same size, and each page number is valid in all blocks of a process. The number
of pages is floor(memory of a rank / bytes of its page), the minimum over ranks, and at most what
``MOST_SEQUENCES`` sequences of the model's maximum length need. A page of P positions takes 2 x key
and value heads of the rank x P x head width x bytes per element in each block with keys and values,
and P x width x bytes per element in each block with latents. For a model that retrieves, the bytes
of `execution.neighbor_memory.NeighborShape` are added.

In blocks with recurrent states, each sequence takes one slot of 4 bytes per element (8 in float64),
whatever its length. The number of slots is floor(memory of a rank / bytes of its slot), the minimum
over ranks, and at most the number of concurrent texts. If there are pages too, slots take at most
half of the memory.

Shapes: X pages, K key and value heads, P positions of a page, D head width, W latent width.
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

# number of maximum-length sequences that the pages can store at most; more memory is not used
MOST_SEQUENCES = 256
TEXTS = 64
"""Default number of texts that run concurrently."""


@dataclass(frozen=True)
class CacheConfig:
    """Memory for keys and values, latents and recurrent states."""

    kv_cache_gib: float | None = option(None, derived="--kv-cache-fraction", bounds=POSITIVE)
    """KV cache memory of each rank, in GiB, including recurrent states."""
    kv_cache_fraction: float | None = option(None, derived="CPU: 0.4; GPU: 0.85", bounds=POSITIVE)
    """Fraction of the memory that is free after loading the model to use for the KV cache and
    recurrent states."""

    @property
    def texts(self) -> int:
        """Maximum number of texts that run concurrently."""
        return TEXTS

    def pages(
        self,
        shape: PageShape,
        max_positions: int,
        device: torch.device,
        world: Group,
        taken: int = 0,
    ) -> int:
        """Return the number of pages, which is the same on every rank. ``taken`` is the number of
        bytes that recurrent states take on this rank. Collective: every rank must call it. Raises
        ConfigError if the pages cannot store the model's longest sequence."""
        room = self._bytes(device) - taken
        needed = -(-max_positions // shape.positions)
        pages = MOST_SEQUENCES * needed
        if shape.bytes:  # a pipeline stage may have only the encoder
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
        """Return the number of slots, which is the same on every rank. ``pages`` is the shape of
        the pages that share the memory. Collective: every rank must call it. Raises ConfigError if
        there is no memory for even one slot."""
        share = 2 if pages.bytes else 1
        room, slots = self._bytes(device), self.texts
        if states.bytes:  # a pipeline stage may have no blocks with states
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
        """Return the number of tokens that the model's own MTP blocks draft in a step. Raises
        ConfigError if the model cannot draft as the flags require."""
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
    """Memory of generation, adapters, and speculative decoding."""

    adapter: tuple[str, ...] = option((), aliases=("--lora-modules",))
    """Adapters for the model of --load, as NAME=FOLDER. A folder is in the format of peft, or a
    checkpoint of a run with --lora."""
    num_speculative_tokens: int = option(0, bounds=NOT_NEGATIVE)
    """Number of tokens of each text to draft and verify in one step (speculative decoding). The
    text is bitwise the same, and takes fewer steps where drafts are accepted. 0 disables drafts."""
    speculative_method: str | None = option(
        None,
        choices=("mtp", "ngram"),
        derived="mtp for a model with --mtp-num-layers, else ngram",
    )
    """Source of drafts: mtp uses the model's multi-token prediction blocks, ngram the tokens that
    followed the previous occurrence of the latest tokens in the text."""

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
    """Return the minimum of ``count`` over all ranks. Collective."""
    if world.size == 1:
        return count
    counts = torch.tensor(count, device=device)
    dist.all_reduce(counts, op=dist.ReduceOp.MIN, group=world.handle)
    return int(counts)


@dataclass(frozen=True)
class PageShape:
    """Contents of a page on one rank: ``positions`` positions of each block in ``layers`` (keyed by
    block number, only blocks with keys and values or latents), and ``others`` additional bytes."""

    layers: Mapping[int, TokenMemory]
    positions: int
    dtype: torch.dtype
    others: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of a page: positions x bytes per element x, for each block, 2 x heads x width for
        keys and values or the width for latents; plus ``others``."""
        numbers = sum(each.tensors * each.heads * each.width for each in self.layers.values())
        return self.positions * numbers * self.dtype.itemsize + self.others


@dataclass(frozen=True)
class StateShape:
    """Recurrent states of a sequence on one rank, for the blocks in ``layers``, by number."""

    layers: Mapping[int, States]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a slot."""
        return sum(states.numbers for states in self.layers.values()) * self.dtype.itemsize


class PageMemory:
    """All pages of a process. Blocks with the same contents share one tensor in ``pools``: [blocks,
    2, X, K, P, D] with keys first, or [blocks, 1, X, 1, P, W] for latents. On a CPU a page takes
    memory only once it is used."""

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
        """Return the keys and values [2, X, K, P, D] of a block, or its latents [1, X, 1, P, W]."""
        return self._of[layer]

    def clear(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros. Attention multiplies unwritten positions by a probability of zero,
        so they must be finite."""
        for pool in self.pools:
            for page in pages:
                pool[:, :, page] = 0.0

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages. ``copies`` are pairs (from, to), applied in order."""
        for pool in self.pools:
            for source, target in copies:
                pool[:, :, target] = pool[:, :, source]


class StateMemory:
    """Recurrent states of all slots of a process: one tensor [slots, ...] for each state of a
    block. On a CPU a slot takes memory only once it is used."""

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
        """Return the states of a block, [slots, ...] each."""
        return self._of[layer]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots. ``copies`` are pairs (from, to), applied in order."""
        for source, target in copies:
            for pools in self._of.values():
                for pool in pools:
                    pool[target] = pool[source]
