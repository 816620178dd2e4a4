"""The blocks of a pass that remember a text in states of a fixed size.

A token's result depends on its own sequence only, to the last bit:

- A prompt is computed in pieces of one length, which begin at its multiples: calls of the same
  shapes however the prompt is cut into parts. The last piece may be shorter, for each prompt alike.
- Generated tokens of several texts are computed together where that gives the same bits as each
  alone. Elementwise kernels of a CPU compute the end of a tensor by other code, so numbers of texts
  are tried out with the block's own function, as :mod:`row_rule` does with products: those of which
  every multiple gives the same bits are filled up to one; else each is alone. On other devices
  nothing is promised, and all are together.

Shapes: T tokens, S tokens of a piece, B generated tokens, X inputs and Y outputs of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.apps.generation.memory import StateMemory
from megatron.apps.generation.request import SequencePart

Step = Callable[[Tensor, tuple[Tensor, ...] | None], tuple[Tensor, tuple[Tensor, ...]]]
"""See `megatron.model.caches.LayerCache.recur`."""
_GROUPS = (1, 2, 4, 8)
_TRIED = (1, 2, 3, 5, 7, 13)  # groups at once
_ALONE = 0


class _Piece(NamedTuple):
    """Rows of a prompt from position ``start`` on, and the slot of its sequence."""

    rows: slice
    start: int
    slot: int


class StateCache:
    """The states of one pass.

    Args:
        piece: positions at whose multiples a prompt is cut.
        groups: numbers of texts that are computed together by shapes of states and inputs, as far
            as they have been tried; 0 for each alone.
    """

    def __init__(
        self,
        memory: StateMemory,
        parts: Sequence[SequencePart],
        piece: int,
        groups: dict[object, int],
    ) -> None:
        self._memory, self._groups = memory, groups
        self._prompts: list[list[_Piece]] = []
        rows, slots, row = [], [], 0
        for part in parts:
            assert part.slot is not None, f"{part}: no slot"
            if part.decoding:
                rows.append(row)
                slots.append(part.slot)
            else:
                self._prompts.append(_pieces(part, row, piece))
            row += len(part.tokens)
        self._rows_B = torch.tensor(rows, dtype=torch.int64, device=memory.device)
        self._slots = slots

    def recur(self, layer: int, inputs_1TX: Tensor, step: Step) -> Tensor:
        """See `LayerCache.recur`."""
        pools, y_1TY = self._memory.of(layer), None

        def write(rows: slice | Tensor, y_SY: Tensor) -> None:
            nonlocal y_1TY
            if y_1TY is None:
                y_1TY = y_SY.new_zeros(1, inputs_1TX.shape[1], y_SY.shape[-1])
            y_1TY[0, rows] = y_SY

        for pieces in self._prompts:
            slot = pieces[0].slot
            states = tuple(pool[slot : slot + 1] for pool in pools) if pieces[0].start else None
            for piece in pieces:
                y_1SY, states = step(inputs_1TX[:, piece.rows], states)
                write(piece.rows, y_1SY[0])
            _store(pools, [slot], states or ())
        if len(self._rows_B):
            x_B1X = inputs_1TX[0].index_select(0, self._rows_B).unsqueeze(1)
            write(self._rows_B, self._decoded(x_B1X, pools, step)[:, 0])
        assert y_1TY is not None
        return y_1TY

    def _decoded(self, x_B1X: Tensor, pools: tuple[Tensor, ...], step: Step) -> Tensor:
        """[B, 1, Y] of generated tokens, whose states are replaced."""
        key = (x_B1X.shape[-1], x_B1X.dtype, *(pool.shape[1:] for pool in pools))
        if key not in self._groups:
            self._groups[key] = group_of(step, x_B1X, pools)
        group, slots = self._groups[key], self._slots
        if group == _ALONE:
            each = zip(x_B1X.split(1), slots, strict=True)
            return torch.cat([_advanced(x, pools, [slot], 1, step) for x, slot in each])
        more = -len(slots) % group
        if more:
            x_B1X = torch.cat([x_B1X, x_B1X[:1].expand(more, -1, -1)])
        return _advanced(x_B1X, pools, [*slots, *slots[:1] * more], len(slots), step)


def _pieces(part: SequencePart, row: int, length: int) -> list[_Piece]:
    """Pieces of a part whose first token is in a row."""
    assert part.slot is not None and part.start % length == 0, f"cut at {part.start}, not {length}"
    count = len(part.tokens)
    return [
        _Piece(slice(row + at, row + min(at + length, count)), part.start + at, part.slot)
        for at in range(0, count, length)
    ]


def _advanced(
    x_B1X: Tensor, pools: tuple[Tensor, ...], slots: Sequence[int], count: int, step: Step
) -> Tensor:
    """[count, 1, Y] of the first ``count`` texts in these slots; replaces their states."""
    y_B1Y, states = step(x_B1X, tuple(pool[_place(slots, pool)] for pool in pools))
    _store(pools, slots[:count], states)
    return y_B1Y[:count]


def _store(pools: tuple[Tensor, ...], slots: Sequence[int], states: Sequence[Tensor]) -> None:
    """Write the states of the texts in ``slots``."""
    for pool, state in zip(pools, states, strict=True):
        assert state.dtype == pool.dtype, f"a state in {state.dtype}, not {pool.dtype}"
        pool[_place(slots, pool)] = state[: len(slots)]


def _place(slots: Sequence[int], pool: Tensor) -> slice | Tensor:
    """Slots as an index of a pool; neighbours are read where they are."""
    first, count = slots[0], len(slots)
    if list(slots) == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(slots, device=pool.device)


@torch.inference_mode()
def group_of(step: Step, x_B1X: Tensor, pools: Sequence[Tensor]) -> int:
    """Return the smallest group of texts whose multiples all give the same results as larger ones;
    0 if none of ``_GROUPS`` does. Inputs are like ``x_B1X`` and states like those of ``pools``."""
    if x_B1X.device.type != "cpu":
        return 1
    random, most = torch.Generator().manual_seed(1), max(_TRIED) + 1

    def some(like: Tensor, count: int) -> Tensor:
        return torch.randn(count, *like.shape[1:], generator=random).to(like.dtype)

    for group in _GROUPS:
        count = most * group
        x, states = some(x_B1X, count), tuple(some(pool, count) for pool in pools)
        whole = _flat(step(x, states))
        if all(
            _same(
                _flat(step(x[at : at + n], tuple(s[at : at + n] for s in states))),
                tuple(each[at : at + n] for each in whole),
            )
            for n in (group * tried for tried in _TRIED)
            for at in (0, group)
        ):
            return group
    return _ALONE


def _flat(results: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return (results[0], *results[1])


def _same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
