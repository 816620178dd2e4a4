"""The search for the chunks of a database that are nearest to others.

Shape suffixes: N queries, M tokens of a query, Q chunks searched for, K neighbours, D documents of
a query's sample.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.embedding import Embedder
from megatron.apps.retro.embedding.texts import chunk_texts
from megatron.apps.retro.index import VectorIndex, open_index
from megatron.apps.retro.index.config import IndexFlags
from megatron.features.retro.project import RetroProject

SEARCHED = 200
"""Neighbours that are searched for, from which those of other documents are taken."""
Documents = Collection[tuple[int, int]]
"""(dataset, document) of some documents."""


class Retriever:
    """Finds the nearest chunks of a project's database.

    Args:
        project: with a database and an index.
        embedder: the one that the index was made with.
        searched: how many chunks are searched for, before any are left out.
        flags: how thoroughly the index is searched.
    """

    def __init__(
        self,
        project: RetroProject,
        embedder: Embedder,
        searched: int = SEARCHED,
        flags: IndexFlags | None = None,
    ) -> None:
        self.project, self.embedder, self.searched = project, embedder, searched
        self.database = project.database()
        self._flags = flags or IndexFlags()

    @cached_property
    def index(self) -> VectorIndex:
        """Opened by the first search."""
        return open_index(self.project, self.embedder, self._flags)

    def neighbors(
        self,
        tokens_NM: npt.NDArray[np.int64],
        k: int,
        exclude: Sequence[Documents] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Numbers of the ``k`` chunks nearest to each chunk of tokens, int64 [N, k], nearest first,
        -1 where there are fewer; without those of the documents that ``exclude`` has for each."""
        texts = chunk_texts(self.project.tokenizer, tokens_NM)
        numbers_NQ, _ = self.index.search(self.embedder.embed(texts), max(self.searched, k))
        dropped_NQ = numbers_NQ < 0
        if exclude is not None:
            dropped_NQ |= self._of_documents(numbers_NQ, exclude)
        return first_kept(numbers_NQ, dropped_NQ, k)

    def _of_documents(
        self, numbers_NQ: npt.NDArray[np.int64], documents: Sequence[Documents]
    ) -> npt.NDArray[np.bool_]:
        """Whether each chunk is of one of the documents of its row."""
        most = max(map(len, documents), default=0)
        own_ND = np.full((len(documents), most), -1, np.int64)
        for own_D, row in zip(own_ND, documents, strict=True):
            own_D[: len(row)] = [dataset << 32 | document for dataset, document in row]
        pairs_NQ2 = self.database.documents(numbers_NQ)
        keys_NQ = pairs_NQ2[..., 0] << 32 | pairs_NQ2[..., 1]  # both have 32 bits in a database
        found_NQ = np.zeros(numbers_NQ.shape, bool)
        for own_N in own_ND.T:
            found_NQ |= keys_NQ == own_N[:, None]
        return found_NQ


def first_kept(
    numbers_NQ: npt.NDArray[np.int64], dropped_NQ: npt.NDArray[np.bool_], k: int
) -> npt.NDArray[np.int64]:
    """The first ``k`` <= Q of each row that are not dropped, followed by -1."""
    order_NK = np.argsort(dropped_NQ, axis=1, kind="stable")[:, :k]
    kept = ~np.take_along_axis(dropped_NQ, order_NK, axis=1)
    return np.where(kept, np.take_along_axis(numbers_NQ, order_NK, axis=1), -1)
