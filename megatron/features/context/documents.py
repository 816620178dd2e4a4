"""Document boundaries in sequences, available on the CPU."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from megatron.model.attention_masks import AttentionMasks

Span = tuple[int, int]


class DocumentBounds:
    """Documents of a micro batch by ids [B, S], in any order.

    The ids are copied to the CPU once, so that attention can skip keys outside a query's document,
    and needs no mask if all keys belong to the same document.
    """

    def __init__(self, ids_BS: Tensor) -> None:
        self.ids = ids_BS
        ids = ids_BS.cpu().numpy()
        places = np.arange(ids.shape[1])
        changes = ids[:, 1:] != ids[:, :-1]
        edge = np.ones((len(ids), 1), dtype=bool)
        # Bounds of the run of equal ids that contains each position.
        starts = np.where(np.hstack((edge, changes)), places, 0)
        ends = np.where(np.hstack((changes, edge)), places + 1, places.size)
        self._starts = np.maximum.accumulate(starts, 1).max(0)
        self._ends = np.minimum.accumulate(ends[:, ::-1], 1)[:, ::-1].min(0)
        firsts, lasts = zip(*map(_occurrences, ids), strict=True)
        self._firsts, self._lasts = np.min(firsts, 0), np.max(lasts, 0)

    @classmethod
    def of(cls, masks: AttentionMasks) -> DocumentBounds | None:
        """Return the bounds for ``masks``, computed once per micro batch, or None without
        documents."""
        ids_BS = masks.document_ids
        return None if ids_BS is None else masks.once("documents of positions", lambda: cls(ids_BS))

    def seen(self, queries: Span) -> Span:
        """Return a range that contains all keys in the documents of a span's queries."""
        at = slice(*queries)
        return int(self._firsts[at].min()), int(self._lasts[at].max()) + 1

    def shared(self, queries: Span) -> Span:
        """Return the range of keys that are in the same document as all queries of a span."""
        at = slice(*queries)
        return int(self._starts[at].max()), int(self._ends[at].min())

    def different(self, queries: Span, keys: Span) -> Tensor:
        """Return a mask of query-key pairs in different documents, bool [B, 1, queries, keys]."""
        ids_BS = self.ids
        return (ids_BS[:, slice(*queries), None] != ids_BS[:, None, slice(*keys)]).unsqueeze(1)


def _occurrences(ids_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each position, the first and last position with the same id."""
    _, firsts, which = np.unique(ids_S, return_index=True, return_inverse=True)
    _, from_end = np.unique(ids_S[::-1], return_index=True)
    return firsts[which], (ids_S.size - 1 - from_end)[which]
