"""Exchange of whole matrices, each gathered on one rank from several ranks and scattered back.

Shapes: see :class:`Deal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.mesh import SINGLE, Coordinates, Group, Mesh
from megatron.parallel.shard import Shard, shard_of

Update = Callable[[Sequence[tuple[nn.Parameter, Tensor]]], list[Tensor]]
"""Function that receives parameters with whole tensors (for experts, those of this rank), and
returns new tensors of the same shapes."""


class OwnedPart(NamedTuple):
    """This rank's partition of a parameter, at ``offset`` of a tensor that the optimizer
    updates."""

    param: nn.Parameter
    holder: Tensor
    offset: int
    length: int


class Deal:
    """Assignment of whole parameters to the ranks that have partitions or shards of them.
    Collective: all ranks must create it.

    Args:
        parts: this rank's partitions of the parameters, in the same order on all ranks.
        replicas: ranks that have the same shard of these parameters, which ZeRO partitions.
    """

    def __init__(self, parts: Sequence[OwnedPart], replicas: Group, mesh: Mesh) -> None:
        self.parts, self._tensor = list(parts), mesh.tensor
        self._device = parts[0].param.device
        places = mesh.coordinates
        self._shards = [over_tensor(shard_of(part.param), places) for part in parts]
        self._shapes = [shard.local_shape(places) for shard in self._shards]
        costs = [_cost(shard.full_shape) for shard in self._shards]
        whole = [math.prod(shape) for shape in self._shapes]
        self._is_first = replicas.rank == 0
        lengths = _of_all([part.length for part in parts], replicas, self._device)
        if lengths == [whole] * replicas.size:  # ZeRO does not partition these parameters
            replicas, lengths = SINGLE, [whole]
        self._divides = replicas.size > 1
        self._over_replicas = PartExchange(replicas, lengths, costs, self._device)
        self._cut = [n for n in self._over_replicas.mine if self._shards[n].cuts]
        sizes = [
            [math.prod(self._shards[n].local_shape(at)) for n in self._cut]
            for at in self._tensor_places
        ]
        costs = [costs[n] for n in self._cut]
        self._over_tensor = PartExchange(self._tensor, sizes, costs, self._device)

    @property
    def owned(self) -> list[tuple[nn.Parameter, bool]]:
        """Whole parameters that this rank updates, each with True if this rank saves its states."""
        mine, first = self._over_replicas.mine, self._tensor.rank == 0
        spread = [shard_of(part.param).over("tensor") is not None for part in self.parts]
        cut = [self._cut[k] for k in self._over_tensor.mine]
        alone = self._divides or self._is_first
        items = [(n, True) for n in cut] + [
            (n, first or spread[n]) for n in mine if n not in self._cut
        ]
        return [(self.parts[n].param, only and alone) for n, only in items]

    def updates(self, pieces: Sequence[Tensor], update: Update) -> list[Tensor]:
        """Update whole parameters, and return this rank's partitions. All ranks must call this."""
        gathered = self._over_replicas.gather(pieces)
        shares = {n: torch.cat(list(each)) if len(each) > 1 else each[0].reshape(-1)
                  for n, each in gathered.items()}  # fmt: skip
        wholes = {n: shares[n].view(self._shapes[n]) for n in shares if n not in self._cut}
        if self._cut:
            joined = self._over_tensor.gather([shares[n] for n in self._cut])
            wholes |= {self._cut[k]: self._joined(self._cut[k], each) for k, each in joined.items()}
        new = update([(self.parts[n].param, whole) for n, whole in wholes.items()])
        updated = dict(zip(wholes, new, strict=True))
        if self._cut:
            again = {k: self._divided(n, updated.pop(n)) for k, n in enumerate(self._cut)
                     if n in updated}  # fmt: skip
            updated |= zip(self._cut, self._over_tensor.scatter(again, pieces[0]), strict=True)
        back = {
            n: each.reshape(-1).split(self._over_replicas.lengths_of(n))
            for n, each in updated.items()
        }
        return self._over_replicas.scatter(back, pieces[0])

    @property
    def _tensor_places(self) -> list[Coordinates]:
        return [{"tensor": (rank, self._tensor.size)} for rank in range(self._tensor.size)]

    def _joined(self, n: int, shares: Sequence[Tensor]) -> Tensor:
        shard = self._shards[n]
        whole = shares[0].new_zeros(shard.full_shape)
        for share, at in zip(shares, self._tensor_places, strict=True):
            shard.place(whole, share.view(shard.local_shape(at)), at)
        return whole

    def _divided(self, n: int, whole: Tensor) -> list[Tensor]:
        return [self._shards[n].cut(whole, at).reshape(-1) for at in self._tensor_places]


class PartExchange:
    """Exchange that gathers all parts of an item on one rank. Items are assigned to ranks by cost,
    starting with the most expensive.

    Args:
        lengths: for each rank, the lengths of its parts of the items.
        costs: relative cost of each item.

    Attributes:
        mine: indices of the items of this rank.
    """

    def __init__(
        self, ranks: Group, lengths: list[list[int]], costs: Sequence[int], device: torch.device
    ) -> None:
        self._ranks, self._lengths, self._device = ranks, lengths, device
        loads = [0] * ranks.size
        self._of: list[list[int]] = [[] for _ in loads]
        for item in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
            rank = loads.index(min(loads))
            loads[rank] += costs[item]
            self._of[rank].append(item)
        self.mine = self._of[ranks.rank]

    def lengths_of(self, item: int) -> list[int]:
        """Return the lengths of an item's parts, by rank."""
        return [lengths[item] for lengths in self._lengths]

    def gather(self, parts: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Send parts of all items, and return all parts of this rank's items, by item and rank."""
        if self._ranks.size == 1:
            return {item: [parts[item]] for item in self.mine}
        sent = [[parts[n] for n in items] for items in self._of]
        sizes = [[lengths[n] for n in self.mine] for lengths in self._lengths]
        received = self._exchanged(sent, sizes, parts[0])
        return {n: [of_rank[k] for of_rank in received] for k, n in enumerate(self.mine)}

    def scatter(self, parts: Mapping[int, Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """Send each rank its parts of this rank's items, and return the own part of every item."""
        own = self._lengths[self._ranks.rank]
        if self._ranks.size == 1:
            return [parts[item][0] for item in range(len(own))]
        sent = [[parts[n][rank] for n in self.mine] for rank in range(self._ranks.size)]
        sizes = [[own[n] for n in items] for items in self._of]
        received = self._exchanged(sent, sizes, like)
        places = {n: (rank, k) for rank, items in enumerate(self._of) for k, n in enumerate(items)}
        return [received[rank][k] for _, (rank, k) in sorted(places.items())]

    def _exchanged(
        self, sent: list[list[Tensor]], sizes: list[list[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send tensors to each rank, and return those received from each, of the given sizes."""
        empty = like.new_empty(0)
        out = torch.cat([part for of_rank in sent for part in of_rank] or [empty]).to(self._device)
        into = out.new_empty(sum(map(sum, sizes)))
        counts = [sum(part.numel() for part in of_rank) for of_rank in sent]
        dist.all_to_all_single(into, out, list(map(sum, sizes)), counts, group=self._ranks.handle)
        parts = into.to(like.device).split([size for of_rank in sizes for size in of_rank])
        remaining = iter(parts)
        return [[next(remaining) for _ in of_rank] for of_rank in sizes]


def of_own_experts(shard: Shard, places: Coordinates) -> Shard:
    """Return a parameter's shard of this rank's experts, cut only over tensor-parallel ranks."""
    shape = list(shard.full_shape)
    others = [cut for cut in shard.cuts if cut.axes != ("tensor",)]
    for cut in others:
        shape[cut.dim] = sum(length for _, length in cut.ranges(shape[cut.dim], places))
    return Shard(tuple(shape), tuple(cut for cut in shard.cuts if cut not in others))


def over_tensor(shard: Shard, places: Coordinates) -> Shard:
    """Return :func:`of_own_experts`, without cuts if there is only one tensor-parallel rank."""
    own = of_own_experts(shard, places)
    return own if places.get("tensor", (0, 1))[1] > 1 else Shard(own.full_shape)


def expert_numbers(shard: Shard, places: Coordinates) -> list[int] | None:
    """Return the indices of a parameter's experts on a rank, or None if it has no experts."""
    cut = shard.over("expert")
    if cut is None:
        return [*range(shard.full_shape[0])] if len(shard.full_shape) == 3 else None
    return [n for start, count in cut.ranges(shard.full_shape[0], places)
            for n in range(start, start + count)]  # fmt: skip


def _cost(shape: Sequence[int]) -> int:
    """Return the relative cost of orthogonalising a parameter."""
    *experts, rows, columns = shape
    return math.prod(experts) * min(rows, columns) ** 2 * max(rows, columns)


def _of_all(numbers: list[int], ranks: Group, device: torch.device) -> list[list[int]]:
    """Gather the numbers of every rank. Collective: all ranks must call this."""
    if ranks.size == 1:
        return [numbers]
    own = torch.tensor(numbers, device=device)
    rows = [torch.empty_like(own) for _ in ranks.ranks]
    dist.all_gather(rows, own, group=ranks.handle)
    return [row.tolist() for row in rows]
