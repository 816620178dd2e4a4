"""Bounds of the documents in sequences, known to the host."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from megatron.model.attention_masks import AttentionMasks

Span = tuple[int, int]


class DocumentBounds:
    """The documents of a micro batch by ids [B, S], in any order.

    The host reads the ids once, so that it can leave out keys that are in no document of a query,
    and masks where one document has them all.
    """

    def __init__(self, ids_BS: Tensor) -> None:
        self.ids = ids_BS
        ids = ids_BS.cpu().numpy()
        places = np.arange(ids.shape[1])
        changes = ids[:, 1:] != ids[:, :-1]
        edge = np.ones((len(ids), 1), dtype=bool)
        # Ends of the run of equal ids that contains each position.
        starts = np.where(np.hstack((edge, changes)), places, 0)
        ends = np.where(np.hstack((changes, edge)), places + 1, places.size)
        self._starts = np.maximum.accumulate(starts, 1).max(0)
        self._ends = np.minimum.accumulate(ends[:, ::-1], 1)[:, ::-1].min(0)
        firsts, lasts = zip(*map(_occurrences, ids), strict=True)
        self._firsts, self._lasts = np.min(firsts, 0), np.max(lasts, 0)

    @classmethod
    def of(cls, masks: AttentionMasks) -> DocumentBounds | None:
        """Return the bounds for masks, made once; None without documents."""
        ids_BS = masks.document_ids
        return None if ids_BS is None else masks.once("documents of positions", lambda: cls(ids_BS))

    def seen(self, queries: Span) -> Span:
        """Return the bounds of the positions with keys of the documents of a span's queries."""
        at = slice(*queries)
        return int(self._firsts[at].min()), int(self._lasts[at].max()) + 1

    def shared(self, queries: Span) -> Span:
        """Positions of keys that are in the same document as all queries of a span."""
        at = slice(*queries)
        return int(self._starts[at].max()), int(self._ends[at].min())

    def different(self, queries: Span, keys: Span) -> Tensor:
        """bool [B, 1, queries, keys], whether they are in different documents."""
        ids_BS = self.ids
        return (ids_BS[:, slice(*queries), None] != ids_BS[:, None, slice(*keys)]).unsqueeze(1)


def _occurrences(ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position with the id of each position."""
    _, firsts, which = np.unique(ids_S, return_index=True, return_inverse=True)
    _, from_end = np.unique(ids_S[::-1], return_index=True)
    return firsts[which], (ids_S.size - 1 - from_end)[which]
