"""Adam-mini (Zhang et al. 2024, arXiv:2406.16793): Adam with one second moment per block of a
parameter. A block is a head of queries or keys, an output row of another matrix, a whole norm, or
one element of a bias. Ranks sum the squared gradients of their shards of each block, so that
results do not depend on the layout.

Shapes: R rows of a rank's shard of a parameter, W elements of a row; B blocks of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.features.optimizers.fused import parts_of
from megatron.features.optimizers.matrices import expert_numbers, of_own_experts
from megatron.features.optimizers.rules import Group, RuleContext, UpdateRule, descend, rooted
from megatron.parallel.mesh import Group as Ranks
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import Shard, shard_of


class Division(NamedTuple):
    """Division of a parameter's rows into blocks.

    Attributes:
        shape: shape of the parameter, with 1 as the last dimension unless each element is a row.
        first: number of rows at the start that form blocks of ``length`` rows. Each of the
            remaining rows is a block.
    """

    shape: tuple[int, ...]
    first: int
    length: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.prod(self.shape) - self.first + self.first // self.length


def division(name: str, shape: Sequence[int], parts: Sequence[int], width: int) -> Division:
    """Return the division of a parameter into blocks, by its name and shape.

    Args:
        parts: numbers of rows of queries, keys and values if the parameter fuses them.
        width: channels of a head.
    """
    if len(shape) == 1 and not name.endswith(".bias"):
        return Division((shape[0],), shape[0], shape[0])
    if len(shape) == 1 or name.endswith(".bias"):
        return Division(tuple(shape), 0, 1)
    rows = (*shape[:-1], 1)
    if ".qkv." in name and len(parts) > 1:
        return Division(rows, parts[0] + parts[1], width)
    return Division(rows, 0, 1)


class MomentBlocks:
    """Blocks of a parameter, restricted to this rank's experts, and their second moments."""

    def __init__(self, param: nn.Parameter, name: str, width: int, mesh: Mesh) -> None:
        shard = of_own_experts(shard_of(param), mesh.coordinates)
        shape, last = shard.canonical_shape, len(shard.full_shape) - 1
        divided = division(name, shape, parts_of(shard_of(param)), width)
        rows, (_, first, length) = torch.arange(math.prod(divided.shape)), divided
        ids = torch.where(rows < first, rows // length, rows - first + first // length)
        ids = ids.view(divided.shape)
        self.row, of_rows = 1, shard
        if divided.shape[-1] != shape[-1]:
            self.row = shard.local_shape(mesh.coordinates)[-1]
            cuts = tuple(cut for cut in shard.cuts if cut.dim != last)
            of_rows = Shard((*shard.full_shape[:-1], 1), cuts)
        self.ids_R = of_rows.cut(ids, mesh.coordinates).reshape(-1).to(param.device)
        elements = math.prod(shape) // ids.numel()
        self.count, self.sizes_B = divided.blocks, torch.bincount(ids.flatten()) * elements
        self.sizes_B = self.sizes_B.to(param.device)
        self.kept_B = _kept(shard, ids, self.count).to(param.device)
        self.moment_B: Tensor | None = None


class _Piece(NamedTuple):
    """Location of this rank's partition of a parameter, in a tensor that the optimizer updates."""

    param: nn.Parameter
    offset: int
    start: int
    length: int


class AdamMini(UpdateRule):
    """Adam-mini for parameters that may be sharded or partitioned.

    Args:
        names: canonical names of the parameters.
        width: channels of an attention head.
    """

    states = ("exp_avg",)

    def __init__(
        self,
        betas: tuple[float, float],
        eps: float,
        names: Mapping[nn.Parameter, str],
        width: int,
        mesh: Mesh,
    ) -> None:
        self._betas, self._eps, self._mesh, self._names = betas, eps, mesh, names
        self.blocks = {
            param: MomentBlocks(param, name, width, mesh) for param, name in names.items()
        }
        self._pieces: dict[Tensor, list[_Piece]] = {}

    @classmethod
    def of(cls, context: RuleContext) -> Self:
        width = context.config.model.attention.kv_channels
        return cls(context.betas, context.eps, context.names, width, context.mesh)

    def update(self, tensors: Sequence[Tensor], states: Sequence[Group], group: Group) -> None:
        (beta1, beta2), step = self._betas, float(states[0]["step"])
        for param in self._names if not self._pieces else ():
            start, holder, offset, length = self.place_of(param)
            piece = _Piece(param, offset, start, length) if length > 0 else _Piece(param, 0, 0, 0)
            self._pieces.setdefault(holder, []).append(piece)
        pieces = [(tensor, piece) for tensor in tensors for piece in self._pieces.get(tensor, ())]
        sums = [self._squares(tensor, piece) for tensor, piece in pieces]
        params = [piece.param for _, piece in pieces]
        self._add_over_ranks(params, sums)
        for param, squares_B in zip(params, sums, strict=True):
            blocks = self.blocks[param]
            if blocks.moment_B is None:
                blocks.moment_B = torch.zeros_like(squares_B)
            blocks.moment_B.lerp_(squares_B / blocks.sizes_B, 1 - beta2)
        updates = {tensor: torch.zeros_like(tensor) for tensor in tensors}
        for tensor, state in zip(tensors, states, strict=True):
            assert tensor.grad is not None
            state["exp_avg"].lerp_(tensor.grad, 1 - beta1)
            updates[tensor] = state["exp_avg"] / (1 - beta1**step)
        for tensor, piece in pieces:
            moment_B = self.blocks[piece.param].moment_B
            assert moment_B is not None
            roots = self._of_elements(rooted(moment_B, beta2, step, self._eps), piece)
            updates[tensor].view(-1).narrow(0, piece.offset, piece.length).div_(roots)
        for tensor, update in updates.items():
            descend(tensor, update, group)

    def _squares(self, tensor: Tensor, piece: _Piece) -> Tensor:
        """Return the sums of squared gradients of this partition, by block."""
        blocks, (first, last) = self.blocks[piece.param], self._rows(piece)
        assert tensor.grad is not None
        sums_B = tensor.new_zeros(blocks.count)
        if piece.length:
            grad = tensor.grad.view(-1).narrow(0, piece.offset, piece.length)
            squares = grad.new_zeros((last - first) * blocks.row)
            squares.narrow(0, piece.start - first * blocks.row, piece.length).copy_(grad).square_()
            rows = squares.view(-1, blocks.row).sum(1)
            sums_B.index_add_(0, blocks.ids_R[first:last], rows)
        return sums_B

    def _of_elements(self, values_B: Tensor, piece: _Piece) -> Tensor:
        """Expand per-block values to the elements of this partition."""
        blocks, (first, last) = self.blocks[piece.param], self._rows(piece)
        rows = values_B[blocks.ids_R[first:last], None].expand(-1, blocks.row)
        return rows.reshape(-1).narrow(0, piece.start - first * blocks.row, piece.length)

    def _rows(self, piece: _Piece) -> tuple[int, int]:
        row, end = self.blocks[piece.param].row, piece.start + piece.length
        return piece.start // row, -(-end // row)

    def _add_over_ranks(self, params: Sequence[nn.Parameter], sums: Sequence[Tensor]) -> None:
        """Sum in place over the ranks that have other shards or partitions of the same blocks."""
        among: dict[Ranks, list[Tensor]] = {}
        for param, sums_B in zip(params, sums, strict=True):
            if self.divided:
                among.setdefault(self._mesh.replicas(shard_of(param)), []).append(sums_B)
        for ranks, tensors in among.items():
            _add(tensors, ranks)
        places, cut = self._mesh.coordinates, []
        for param, sums_B in zip(params, sums, strict=True):
            over = of_own_experts(shard_of(param), places).over("tensor")
            if over is not None:
                cut.append(sums_B)
                if over.of(places)[0] % over.copies:  # another rank has the same shard
                    sums_B.zero_()
        _add(cut, self._mesh.tensor)

    def more_states(self, groups: Sequence[Group]) -> dict[str, Tensor]:
        return {
            key: values
            for param, blocks in self.blocks.items()
            if blocks.moment_B is not None and self._writes(shard_of(param))
            for key, values in self._named(param, blocks.moment_B * blocks.kept_B)
        }

    def load_more(self, read: Callable[[str], Tensor], groups: Sequence[Group]) -> None:
        for param, blocks in self.blocks.items():
            names = [key.partition("/")[0] for key, _ in self._named(param, blocks.sizes_B)]
            values = torch.cat([read(name) for name in names])
            values = values.to(param.device, self.place_of(param)[1].dtype)
            blocks.moment_B = values * blocks.kept_B

    def _writes(self, shard: Shard) -> bool:
        """Return whether this rank saves these moments: it is the first of those that have them."""
        places, over = self._mesh.coordinates, shard.over("tensor")
        spread = over is not None and "expert" in over.axes
        first = self._mesh.tensor.rank == 0 or spread
        return first and shard.counted(places, ("data", "context", "expert"))

    def _named(self, param: nn.Parameter, values_B: Tensor) -> Iterator[tuple[str, Tensor]]:
        shard = shard_of(param)
        name, part = f"{self._names[param]}:blocks", f"/{shard.part}" if shard.part else ""
        experts = expert_numbers(shard, self._mesh.coordinates)
        if experts is None:
            yield name + part, values_B
        else:
            of_experts = values_B.view(len(experts), -1)
            yield from ((f"{name}:{n}{part}", of_experts[k]) for k, n in enumerate(experts))


def _add(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    if tensors and ranks.size > 1:
        flat = torch.cat([tensor.view(-1) for tensor in tensors])
        dist.all_reduce(flat, group=ranks.handle)
        for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))


def _kept(shard: Shard, ids: Tensor, count: int) -> Tensor:
    """Return 1 for the blocks of this parameter. Blocks of fused matrices that another parameter
    holds get 0."""
    kept = torch.zeros(count)
    cut = next((cut for cut in shard.cuts if cut.held is not None), None)
    if cut is None:
        return kept + 1
    for part, rows in enumerate(ids.split(list(cut.parts), cut.dim)):
        if part in (cut.held or ()):
            kept[rows.unique()] = 1
    return kept
