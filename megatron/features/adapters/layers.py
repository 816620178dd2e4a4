"""Adapters of a tensor-parallel linear layer: their parameters and outputs.

An adapter belongs to one linear module of the Hugging Face model: a whole layer, or some of the
matrices fused in it. Its parameters are registered in the layer, next to the weight:

- ``lora_a`` [r, I], initialised uniformly between -1/sqrt(I) and 1/sqrt(I), as in peft;
- ``lora_b`` [O, r], initialised to zero and sharded by rows like the weight. If ranks share key and
  value heads, those rows are ``lora_kv_b``, which is part of the same canonical parameter, as for
  the weight;
- with DoRA ``lora_magnitude`` [O] (and ``lora_kv_magnitude``), the norms of the rows.

For one of several fused matrices, the name includes the matrix: ``lora_q_a``.

Shapes: B batch, S sequence, I input, O output, r rank. A suffix P marks one tensor-parallel rank's
shard of a dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.low_rank import LowRank, UpPlace, low_rank_linear
from megatron.parallel.collectives import start_all_reduce, start_sum_over_copies
from megatron.parallel.layers import ParallelLinear, RowMap
from megatron.parallel.linear import LinearMap, column_linear
from megatron.parallel.mesh import SINGLE, Group
from megatron.parallel.shard import Cut, Init, Shard, parameter, shard_of
from megatron.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Addition:
    """One adapter of a layer. For some of several fused matrices, ``parts`` are their indices and
    ``name`` is their name. Both fields are empty for the whole layer."""

    name: str = ""
    parts: tuple[int, ...] = ()

    def parameter(self, kind: str, part: str = "") -> str:
        """Return the name of an adapter parameter in the layer. ``kind`` is a, b or magnitude."""
        return "_".join(filter(None, ("lora", self.name, part, kind)))


def add_adapters(
    layer: ParallelLinear, additions: Sequence[Addition], config: AdapterConfig
) -> None:
    """Register the parameters of adapters in a layer, uninitialised, and attach their outputs."""
    layer.adapters = _Adapters(layer, additions, config)


@dataclass(frozen=True)
class _Rows:
    """Rows of an adapter's B (and magnitude) on this rank. They apply to the outputs [start, start
    + width) of the layer's linear map ``map``, and belong to the adapter ``addition``."""

    name: str
    magnitude: str
    map: int
    start: int
    width: int
    addition: int
    copies: int


class _Adapters:
    def __init__(
        self, layer: ParallelLinear, additions: Sequence[Addition], config: AdapterConfig
    ) -> None:
        tp = layer.tp
        self._rank, self._dropout, self._dora = (
            config.lora_rank,
            config.lora_dropout,
            config.use_dora,
        )
        self._downs = tuple(addition.parameter("a") for addition in additions)
        self._rows: list[_Rows] = []
        weights = [weight for name, weight in layer.named_parameters(recurse=False)
                   if name in ("weight", "kv_weight")]  # fmt: skip
        across = [shard_of(weight).over("tensor") for weight in weights]
        (outputs, inputs) = shard_of(weights[0]).full_shape
        self._by_inputs = across[0] is not None and across[0].dim == 1
        # The layer is not tensor-parallel: each rank computes its slice of the sequence.
        self._whole = across[0] is None
        for number, addition in enumerate(additions):
            cuts = (Cut(1),) if self._by_inputs else ()
            down = Shard((self._rank, inputs), cuts)
            bound = Init(bound=inputs**-0.5)
            layer.register_parameter(self._downs[number], parameter(down, bound, tp.coordinates))
            for place, cut in enumerate(across):
                self._add_rows(layer, addition, number, place, cut, outputs)
        copies = tp.group.size if self._by_inputs else 1
        self._form = LowRank(
            maps=len(weights),
            downs=len(self._downs),
            pieces=tuple(
                UpPlace(r.map, r.start, r.width, r.addition * self._rank, max(copies, r.copies))
                for r in self._rows
            ),
            scale=config.scale,
            group=SINGLE if self._whole else tp.group,
            enters=not self._by_inputs,
            sequence=self._gathers(tp),
        )

    def _add_rows(
        self,
        layer: ParallelLinear,
        addition: Addition,
        number: int,
        place: int,
        cut: Cut | None,
        outputs: int,
    ) -> None:
        if cut is None or self._by_inputs:
            assert not addition.parts
            up, wanted, held, start = Shard((outputs, self._rank)), [0], [0], 0
            width = outputs
        else:
            lengths = cut.parts or (outputs,)
            wanted = list(addition.parts or range(len(lengths)))
            inside = list(cut.held if cut.held is not None else range(len(lengths)))
            held = [part for part in wanted if part in inside]
            if not held:
                return
            first = inside.index(held[0])
            assert held == inside[first : first + len(held)], addition
            places = layer.tp.group.size // cut.copies
            widths = [lengths[part] // places for part in inside]
            start = [0, *accumulate(widths)][first]
            width = sum(widths[first : first + len(held)])
            own = Cut(
                0,
                parts=tuple(lengths[part] for part in wanted) if len(wanted) > 1 else (),
                held=None if held == wanted else tuple(wanted.index(part) for part in held),
                copies=cut.copies,
            )
            up = Shard((sum(lengths[part] for part in wanted), self._rank), (own,))
        part = "kv" if held != wanted and place else ""
        names: dict[str, str] = {}
        for kind, shape, init in (
            ("b", up.full_shape, Init()),
            ("magnitude", up.full_shape[:1], Init(constant=1.0)),
        ):
            name = names[kind] = addition.parameter(kind, part)
            if kind == "b" or self._dora:
                whole = addition.parameter(kind) if held != wanted else None
                shard = replace(up, full_shape=shape, whole=whole)
                layer.register_parameter(name, parameter(shard, init, layer.tp.coordinates))
        copies = 1 if cut is None else cut.copies
        rows = _Rows(names["b"], names["magnitude"], place, start, width, number, copies)
        self._rows.append(rows)

    def _gathers(self, tp: TensorParallel) -> bool:
        """Return whether the layer all-gathers the whole sequence from the ranks' slices."""
        return tp.split and not (self._by_inputs or self._whole)

    def outputs(
        self, layer: ParallelLinear, x_BSI: Tensor, maps: Sequence[LinearMap]
    ) -> tuple[Tensor, ...]:
        assert all(each.kernel is None for each in maps)
        drops = layer.training and self._dropout and self._downs
        dropped = self._dropped(layer, x_BSI) if drops else None
        if self._dora:
            return self._scaled(layer, x_BSI, dropped, maps)
        # A row-parallel layer adds the bias once, after the sum over ranks.
        later = self._by_inputs and layer.tp.group.size > 1
        biases = [None if later else each.bias for each in maps]
        outputs = self._added(layer, x_BSI, dropped, maps, biases)
        if not self._by_inputs:
            return outputs
        y_BSO, bias = layer.tp.leave(outputs[0]), maps[0].bias
        return (y_BSO + layer.tp.shared(bias)[0] if later and bias is not None else y_BSO,)

    def changed(self, layer: ParallelLinear, weight: Tensor) -> Sequence[RowMap]:
        inputs = shard_of(layer.weight).full_shape[1]  # type: ignore[arg-type]
        ones_1II = torch.eye(inputs, dtype=weight.dtype, device=weight.device)[None]
        (columns_1IO,) = self.outputs(layer, ones_1II, (LinearMap(weight, None),))
        return [(None, columns_1IO[0].t())]

    def _added(
        self,
        layer: ParallelLinear,
        x_BSI: Tensor,
        dropped_BSI: Tensor | None,
        maps: Sequence[LinearMap],
        biases: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """Return x W^T + b + s (x A^T) B^T for each map. These are partial sums in row-parallel
        layers."""
        downs = [getattr(layer, name) for name in self._downs]
        ups = [getattr(layer, rows.name) for rows in self._rows]
        weights = [each.weight for each in maps]
        if self._whole:
            shared = layer.tp.shared(*downs, *ups)
            downs, ups = list(shared[: len(downs)]), list(shared[len(downs) :])
        form, split = self._form, self._gathers(layer.tp)
        if form.sequence != split:  # generation does not use sequence parallelism
            form = LowRank(*form[:-1], sequence=split)
        return low_rank_linear(x_BSI, dropped_BSI, form, *weights, *biases, *downs, *ups)

    def _dropped(self, layer: ParallelLinear, x_BSI: Tensor) -> Tensor:
        """Apply dropout to the input, with one mask that all adapters of the layer share."""
        tp = layer.tp
        random = tp.random_inside() if self._by_inputs else tp.random()
        with random:
            return F.dropout(x_BSI, self._dropout)

    def _scaled(
        self,
        layer: ParallelLinear,
        x_BSI: Tensor,
        dropped_BSI: Tensor | None,
        maps: Sequence[LinearMap],
    ) -> tuple[Tensor, ...]:
        """Return the outputs with DoRA (Liu et al. 2024, arXiv:2402.09353, equation 5). Each row of
        W + s B A is divided by its norm, which has no gradient (section 4.3), and multiplied by its
        magnitude. As in peft, dropout applies to all terms except W x."""
        tp, nothing = layer.tp, [None] * len(maps)
        inner = x_BSI if dropped_BSI is None else dropped_BSI
        outputs = list(self._added(layer, inner, None, maps, nothing))
        if self._by_inputs:
            outputs = [tp.leave(outputs[0])]
        factors = self._factors(layer, maps)
        outputs = [y * factor for y, factor in zip(outputs, factors, strict=True)]
        if dropped_BSI is not None:
            # Let d be the dropped input and f the factors: y = W x + (f - 1) W d + f s B A d.
            rest = [LinearMap(each.weight, None, *each[2:]) for each in maps]
            if self._by_inputs:
                own = F.linear(x_BSI - dropped_BSI, maps[0].weight)
                others: Sequence[Tensor] = (tp.leave(own),)
            elif self._whole:
                others = (F.linear(x_BSI - dropped_BSI, maps[0].weight),)
            else:
                others = column_linear(x_BSI - dropped_BSI, rest, tp)
            outputs = [y + other for y, other in zip(outputs, others, strict=True)]
        for place, each in enumerate(maps):
            if each.bias is not None:
                bias = tp.shared(each.bias)[0] if self._by_inputs else each.bias
                outputs[place] = outputs[place] + bias
        return tuple(outputs)

    def _factors(self, layer: ParallelLinear, maps: Sequence[LinearMap]) -> list[Tensor]:
        """Return the factors of each map's outputs, [OP]; 1 for rows without an adapter."""
        parts: list[list[Tensor]] = [[] for _ in maps]
        ends = [0] * len(maps)
        for rows in sorted(self._rows, key=lambda rows: (rows.map, rows.start)):
            weight = maps[rows.map].weight
            if rows.start > ends[rows.map]:
                parts[rows.map].append(weight.new_ones(rows.start - ends[rows.map]))
            magnitude = getattr(layer, rows.magnitude)
            if self._by_inputs or self._whole:
                (magnitude,) = layer.tp.shared(magnitude)
            elif rows.copies > 1:
                magnitude = _SummedOverCopies.apply(magnitude, rows.copies, layer.tp.group)
            lengths_O = self._lengths(layer, rows, weight)
            parts[rows.map].append((magnitude / lengths_O).to(weight.dtype))
            ends[rows.map] = rows.start + rows.width
        for found, end, each in zip(parts, ends, maps, strict=True):
            if end < each.weight.shape[0]:
                found.append(each.weight.new_ones(each.weight.shape[0] - end))
        return [torch.cat(found) for found in parts]

    @torch.no_grad()
    def _lengths(self, layer: ParallelLinear, rows: _Rows, weight: Tensor) -> Tensor:
        """Return the norms of the rows of W + s B A, without computing this matrix: |w + s b A|^2 =
        |w|^2 + 2 s b (A w^T) + s^2 b (A A^T) b^T. Computed in at least float32."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight_OI = weight.narrow(0, rows.start, rows.width)
        down_rI = getattr(layer, self._downs[rows.addition]).to(weight.dtype)
        up_Or, scale = getattr(layer, rows.name).to(wide), self._form.scale
        squares_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=wide).square()
        mixed_Or = (weight_OI @ down_rI.t()).to(wide)
        mixed_Or = 2 * scale * mixed_Or + scale**2 * (up_Or @ (down_rI @ down_rI.t()).to(wide))
        squares_O += (mixed_Or * up_Or).sum(1)
        if self._by_inputs and layer.tp.group.size > 1:
            start_all_reduce(squares_O, layer.tp.group)()
        return squares_O.sqrt()


class _SummedOverCopies(torch.autograd.Function):
    """Identity in the forward pass. The backward pass sums the gradient over the ranks that have
    copies of the same shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, group: Group) -> Tensor:
        ctx.copies, ctx.group = copies, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = start_sum_over_copies(grad.flatten(), ctx.copies, ctx.group)()
        return total.view_as(grad), None, None
