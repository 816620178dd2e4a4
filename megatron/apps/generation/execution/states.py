"""Recurrent blocks in a pass: blocks that store a sequence in states of a fixed size.

A token's result depends on its own sequence only, to the last bit:

- A prompt is computed in pieces of one length, which start at multiples of it. So the calls have
  the same shapes however the prompt is split into parts. Only the last piece of a prompt may be
  shorter.
- Generated tokens of several sequences are computed together if that gives the same bits as
  computing each alone. Elementwise CPU kernels compute the end of a tensor with other code, so
  batch sizes are measured with the block's own function, as :mod:`row_rule` does for GEMMs. A batch
  is padded to a multiple of the smallest size whose multiples all give the same bits. If no size
  does, each sequence is computed alone. On other devices all sequences are computed together,
  without this guarantee.

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
"""See `megatron.features.recurrent.passing.RecurrentCache.recur`."""
_GROUPS = (1, 2, 4, 8)
_TRIED = (1, 2, 3, 5, 7, 13)  # batch sizes to measure, in groups
_ALONE = 0


class _Piece(NamedTuple):
    """Piece of a prompt: its rows in the pass, its first position, and the slot of its sequence."""

    rows: slice
    start: int
    slot: int


class StateCache:
    """Recurrent states of one pass.

    Args:
        piece: prompts are cut at positions that are multiples of this.
        groups: cache of the measured group sizes, by shapes of inputs and states. 0 means that each
            sequence is computed alone.
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
        """Run the block on generated tokens, updating their states. Return [B, 1, Y]."""
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
    """Return the pieces of a part whose first token is in ``row``."""
    assert part.slot is not None and part.start % length == 0, f"cut at {part.start}, not {length}"
    count = len(part.tokens)
    return [
        _Piece(slice(row + at, row + min(at + length, count)), part.start + at, part.slot)
        for at in range(0, count, length)
    ]


def _advanced(
    x_B1X: Tensor, pools: tuple[Tensor, ...], slots: Sequence[int], count: int, step: Step
) -> Tensor:
    """Run ``step`` with the states in these slots. Update only the first ``count`` of them, and
    return [count, 1, Y]."""
    y_B1Y, states = step(x_B1X, tuple(pool[_place(slots, pool)] for pool in pools))
    _store(pools, slots[:count], states)
    return y_B1Y[:count]


def _store(pools: tuple[Tensor, ...], slots: Sequence[int], states: Sequence[Tensor]) -> None:
    """Write the states of the texts in ``slots``."""
    for pool, state in zip(pools, states, strict=True):
        assert state.dtype == pool.dtype, f"a state in {state.dtype}, not {pool.dtype}"
        pool[_place(slots, pool)] = state[: len(slots)]


def _place(slots: Sequence[int], pool: Tensor) -> slice | Tensor:
    """Return an index into a pool for these slots: a slice, without a copy, if consecutive."""
    first, count = slots[0], len(slots)
    if list(slots) == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(slots, device=pool.device)


@torch.inference_mode()
def group_of(step: Step, x_B1X: Tensor, pools: Sequence[Tensor]) -> int:
    """Return the smallest group size whose multiples all give the same bits as larger batches, or 0
    if no size in ``_GROUPS`` does. Measured with random inputs and states like ``x_B1X`` and
    ``pools``."""
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
