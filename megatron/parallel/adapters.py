"""Low-rank additions to a linear layer that is cut over ranks: their parameters and outputs.

An addition is that of one linear module of a Hugging Face model: to all outputs of a layer, or to
some of the matrices fused in it. The parameters are the layer's own, beside its weight:

- ``lora_a`` [r, I], drawn uniformly between -1/sqrt(I) and 1/sqrt(I), as peft does;
- ``lora_b`` [O, r], zero at first, with the rows of the weight; where ranks share key and value
  heads those rows are ``lora_kv_b``, a part of the same whole, as they are of the weight;
- with DoRA ``lora_magnitude`` [O] (and ``lora_kv_magnitude``), the lengths of the rows.

Where the addition is to one of the fused matrices its name follows ``lora``: ``lora_q_a``.

Shapes: B batch, S sequence, I input, O output, r rank; a width followed by P is one rank's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from megatron.config.adapters import AdapterConfig
from megatron.parallel.layers import LinearMap, ParallelLinear
from megatron.parallel.low_rank import LowRank, Piece, low_rank_linear
from megatron.parallel.shard import Cut, Init, Shard, parameter, shard_of


@dataclass(frozen=True)
class Addition:
    """One low-rank addition to a layer: to the fused matrices with these indices, all where there
    are none; ``name`` is that of a matrix, empty for the whole layer."""

    name: str = ""
    parts: tuple[int, ...] = ()

    def parameter(self, kind: str, part: str = "") -> str:
        """The name of a parameter in the layer; ``kind`` is a, b or magnitude."""
        return "_".join(filter(None, ("lora", self.name, part, kind)))


def add_adapters(
    layer: ParallelLinear, additions: Sequence[Addition], config: AdapterConfig
) -> None:
    """Gives a layer the parameters of these additions, uninitialised, and their outputs."""
    layer.adapters = _Adapters(layer, additions, config)


@dataclass(frozen=True)
class _Rows:
    """A parameter with rows of one of a layer's weights: of map ``map`` the outputs [start, start +
    width), for addition number ``addition``."""

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
        for number, addition in enumerate(additions):
            cuts = (Cut(1),) if self._by_inputs else ()
            down = Shard((self._rank, inputs), cuts)
            bound = Init(bound=inputs**-0.5)
            layer.register_parameter(self._downs[number], parameter(down, bound, tp.coordinates))
            for place, cut in enumerate(across):
                assert cut is not None
                self._add_rows(layer, addition, number, place, cut, outputs)
        copies = tp.group.size if self._by_inputs else 1
        self._form = LowRank(
            count=len(weights),
            downs=len(self._downs),
            pieces=tuple(
                Piece(r.map, r.start, r.width, r.addition * self._rank, max(copies, r.copies))
                for r in self._rows
            ),
            scale=config.scale,
            group=tp.group,
            enters=not self._by_inputs,
            sequence=tp.split and not self._by_inputs,
        )

    def _add_rows(
        self,
        layer: ParallelLinear,
        addition: Addition,
        number: int,
        place: int,
        cut: Cut,
        outputs: int,
    ) -> None:
        if self._by_inputs:
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
            assert held == list(range(held[0], held[-1] + 1)), addition
            places = layer.tp.group.size // cut.copies
            widths = [lengths[part] // places for part in inside]
            first = inside.index(held[0])
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
        names = []
        for kind, shape, init in (
            ("b", up.full_shape, Init()),
            ("magnitude", up.full_shape[:1], Init(constant=1.0)),
        ):
            names.append(addition.parameter(kind, part))
            if kind == "b" or self._dora:
                whole = addition.parameter(kind) if held != wanted else None
                shard = replace(up, full_shape=shape, whole=whole)
                layer.register_parameter(names[-1], parameter(shard, init, layer.tp.coordinates))
        self._rows.append(_Rows(*names, place, start, width, number, cut.copies))

    def outputs(
        self, layer: ParallelLinear, x_BSI: Tensor, maps: Sequence[LinearMap]
    ) -> tuple[Tensor, ...]:
        assert all(each.float8 is None for each in maps)
        downs = [getattr(layer, name) for name in self._downs]
        ups = [getattr(layer, rows.name) for rows in self._rows]
        weights, biases = [each.weight for each in maps], [each.bias for each in maps]
        if self._by_inputs:
            # The bias is added once, after the sum over ranks.
            alone = layer.tp.group.size == 1
            own = biases if alone else [None]
            (y_BSO,) = low_rank_linear(x_BSI, self._form, *weights, *own, *downs, *ups)
            if alone:
                return (y_BSO,)
            y_BSO = layer.tp.leave(y_BSO)
            return (y_BSO if biases[0] is None else y_BSO + layer.tp.shared(biases[0])[0],)
        return low_rank_linear(x_BSI, self._form, *weights, *biases, *downs, *ups)
