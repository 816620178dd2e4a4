"""The chunks of a retrieval database, and their tokens.

Shape suffixes: N chunks, R tokens of a chunk with its continuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.samples import Documents
from megatron.features.retro.hdf5 import MappedArray

DATASET, DOCUMENT, START, STOP, BERT_LENGTH = range(5)
"""The columns of a table of chunks."""


class ChunkDatabase:
    """Chunks of the documents of several datasets; item i of ``table``, uint32 [N, 5], says of
    chunk i its dataset, its document there, its first token, the one after its last, and its length
    in the tokens of the embedder.

    Args:
        datasets: the documents of each dataset, by its number.
        chunk_length: tokens of a chunk, fewer at the end of a document.
        eod: the token that short ones are padded with.
        sources: what flags called each dataset, where that is not the prefix of its documents.
    """

    def __init__(
        self,
        table: npt.NDArray[np.uint32],
        datasets: Sequence[Documents],
        chunk_length: int,
        eod: int,
        sources: Sequence[str] = (),
    ) -> None:
        self.table = table
        self.chunk_length, self.eod = chunk_length, eod
        self._datasets = datasets
        self.sources = list(sources) or [each.prefix for each in datasets]
        """The prefix or file of each dataset, as flags named it."""
        self.numbers = {name: number for number, name in enumerate(self.sources)}
        """The dataset of each source; of several, as two ranges of a file are, the last."""
        self._number = np.array([self.numbers[name] for name in self.sources], np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Without the content of a table in a file, for workers of a loader."""
        return self.__dict__ | {"table": MappedArray.of(self.table) or self.table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        table = state["table"]
        opened = table.open() if isinstance(table, MappedArray) else table
        self.__dict__.update(state, table=opened)

    def __len__(self) -> int:
        return len(self.table)

    def tokens(self, chunks: npt.ArrayLike, retrieved: int = 1) -> npt.NDArray[np.int64]:
        """The tokens of chunks, int64 [...], each with those that follow it in its document,
        ``retrieved`` chunks in all: int64 [..., retrieved * chunk_length]. After the end of its
        document, and for chunk -1, the end-of-document token. ValueError if there is no such
        chunk, or it is in no document."""
        chunks = np.asarray(chunks, np.int64)
        length = retrieved * self.chunk_length
        tokens_NR = np.full((chunks.size, length), self.eod, np.int64)
        if chunks.size and int(chunks.max()) >= len(self):
            raise ValueError(
                f"chunk {chunks.max()} of a database of {len(self)}: the neighbours are those of "
                "another database; run query-neighbors again"
            )
        rows = self.table[np.maximum(chunks.ravel(), 0)].tolist()
        for tokens_R, chunk, row in zip(tokens_NR, chunks.ravel().tolist(), rows, strict=True):
            if chunk < 0:
                continue
            try:
                documents = self._datasets[row[DATASET]]
                available = int(documents.sequence_lengths[row[DOCUMENT]]) - row[START]
                count = min(length, available)
                tokens_R[:count] = documents.get(row[DOCUMENT], row[START], count)
            except IndexError as error:
                raise ValueError(
                    f"chunk {chunk} of the database is in no document of {self.sources} ({error}): "
                    "it is damaged, or of other data; run db-build again"
                ) from None
        return tokens_NR.reshape(*chunks.shape, length)

    def documents(self, chunks: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """(dataset, document) of chunks, int64 [...]: int64 [..., 2], both -1 for chunk -1. The
        dataset is that of ``numbers``."""
        chunks = np.asarray(chunks, np.int64)
        found = np.full((*chunks.shape, 2), -1, np.int64)
        known = chunks >= 0
        found[known] = self.table.take(chunks[known], axis=0)[:, :START]  # whole rows are faster
        found[known, 0] = self._number[found[known, 0]]
        return found
