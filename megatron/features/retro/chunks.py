"""Chunks of a retrieval database, and the neighbours of training samples' chunks.

Shape suffixes: N chunks, R tokens in a chunk with its continuation, L chunks per sample.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.samples import Documents, checked_index
from megatron.features.retro.hdf5 import MappedArray, read_array

DATASET, DOCUMENT, START, STOP, BERT_LENGTH = range(5)
"""Column indices of a chunk table."""
NEIGHBORS = "neighbors"
"""Name of the HDF5 dataset in a neighbour file."""
_STAGE = "query-pretraining-neighbors"
_NAME = re.compile(r"(\d+)-(\d+)\.hdf5")
_FILES_READ = 4
"""Number of neighbour files kept in memory if they cannot be memory-mapped."""


class ChunkDatabase:
    """Retrieval database: fixed-length chunks of documents in several datasets. Row i of ``table``,
    uint32 [N, 5], describes chunk i: its dataset, its document in the dataset, its first token, the
    token after its last, and its length in tokens of the embedding model.

    Args:
        datasets: documents of each dataset, by dataset index.
        chunk_length: tokens per chunk. A document's last chunk may have fewer.
        eod: token that pads short chunks.
        sources: name of each dataset in the flags, if it is not the prefix of its documents.
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
        """Prefix or file of each dataset, as given in the flags."""
        self.numbers = {name: number for number, name in enumerate(self.sources)}
        """Index of each source in ``sources``: the last one if it has several ranges of a file."""
        self._number = np.array([self.numbers[name] for name in self.sources], np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling. A memory-mapped table is replaced by its location, so that
        each loader worker maps it itself."""
        return self.__dict__ | {"table": MappedArray.of(self.table) or self.table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        table = state["table"]
        opened = table.open() if isinstance(table, MappedArray) else table
        self.__dict__.update(state, table=opened)

    def __len__(self) -> int:
        return len(self.table)

    def tokens(self, chunks: npt.ArrayLike, retrieved: int = 1) -> npt.NDArray[np.int64]:
        """Return the tokens of chunks [...], each followed by its continuation in the same
        document: int64 [..., retrieved * chunk_length], where ``retrieved`` includes the chunk
        itself. The end-of-document token pads the end of a document, and fills the tokens of chunk
        -1. Raises ValueError if a chunk does not exist, or if its document does not contain it."""
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
        """Return the (dataset, document) indices of chunks [...], int64 [..., 2]. Both are -1 for
        chunk -1. Dataset indices are the values of ``numbers``."""
        chunks = np.asarray(chunks, np.int64)
        documents = np.full((*chunks.shape, 2), -1, np.int64)
        known = chunks >= 0
        # taking whole rows is faster than selecting columns
        rows = self.table.take(chunks[known], axis=0)
        documents[known] = rows[:, :START]
        documents[known, 0] = self._number[documents[known, 0]]
        return documents


class NeighborTable:
    """Neighbours of every chunk of every sample in one split (train, valid or test), from a
    project's files.

    The layout is Megatron's: ``query/SPLIT_HASH/START-END.hdf5``, each with a dataset
    ``neighbors``, int64 [END - START, kept]. Its values are indices of database chunks, nearest
    first, padded with -1. Row r belongs to chunk r % L of sample r // L, so a sample's rows may
    span two files. Raises ValueError if files are missing, or were written for samples with another
    number of chunks than ``chunks_per_sample`` (L).
    """

    def __init__(self, folder: str | Path, chunks_per_sample: int) -> None:
        self.folder = Path(folder)
        self.chunks_per_sample = chunks_per_sample
        self._starts, self._files = _files_of(self.folder)
        self._arrays: dict[int, np.ndarray] = {}
        rows = self._starts[-1]
        if chunks_per_sample < 1 or rows % chunks_per_sample:
            raise ValueError(
                f"{self.folder} has the neighbours of {rows} chunks, which are no whole samples of "
                f"{chunks_per_sample} chunks: it was made for another --retro-gpt-seq-length or "
                f"--retro-gpt-chunk-length; delete it and run the stage {_STAGE} again"
            )

    def __len__(self) -> int:
        return self._starts[-1] // self.chunks_per_sample

    @cached_property
    def kept(self) -> int:
        """Number of neighbours per chunk in the files, including padding."""
        return int(self._file(0).shape[1])

    def rows(self, sample: int) -> npt.NDArray[np.int64]:
        """Return the neighbours of a sample's chunks, [L, kept]. Raises IndexError if the sample
        does not exist, and ValueError if a file is damaged."""
        first = checked_index(sample, len(self)) * self.chunks_per_sample
        return self.chunk_rows(first, first + self.chunks_per_sample)

    def chunk_rows(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the neighbours of chunks ``first`` to ``stop`` - 1, [stop - first, kept]. Chunks
        are numbered across all samples."""
        rows = np.empty((stop - first, self.kept), np.int64)
        row = first
        while row < stop:
            number = bisect.bisect_right(self._starts, row) - 1
            start, end = self._starts[number], min(self._starts[number + 1], stop)
            rows[row - first : end - first] = self._file(number)[row - start : end - start]
            row = end
        return rows

    def _file(self, number: int) -> np.ndarray:
        if number not in self._arrays:
            self._arrays[number] = self._checked(number)
            read = [n for n, array in self._arrays.items() if array.flags.owndata]
            for n in read[:-_FILES_READ]:
                del self._arrays[n]
        return self._arrays[number]

    def _checked(self, number: int) -> np.ndarray:
        """Return the array in file ``number``. Raises ValueError if its shape does not match the
        file name or the first file."""
        path = self._files[number]
        array = read_array(path, NEIGHBORS)
        rows = self._starts[number + 1] - self._starts[number]
        columns = array.shape[1] if array.ndim == 2 else 0
        kept = self.kept if number else columns
        if array.dtype != np.int64 or array.shape != (rows, kept):
            raise ValueError(
                f"{path}: {NEIGHBORS} is {array.dtype} {list(array.shape)}, not int64 "
                f"{[rows, kept]}; delete the file and run the stage {_STAGE} again"
            )
        return array

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without file contents. Workers open the files they
        read."""
        return self.__dict__ | {"_arrays": {}}


def _files_of(folder: Path) -> tuple[list[int], Sequence[Path]]:
    """Return the index of each file's first row, followed by the total number of rows, and the
    paths. Raises ValueError if there are no files, or if rows are missing or repeated."""
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    ranges = sorted(
        (int(match[1]), int(match[2]), match[0]) for match in map(_NAME.fullmatch, names) if match
    )
    if not ranges:
        raise ValueError(
            f"{folder} has no neighbours: run tools/retro/preprocess_data.py --retro-tasks {_STAGE}"
        )
    for (_, stop, name), (start, _, following) in pairwise([(0, 0, "row 0"), *ranges]):
        if start != stop:
            what = "missing" if start > stop else "in several files"
            raise ValueError(
                f"{folder}: rows between {name} and {following} are {what}; run the stage {_STAGE} "
                "again, which finishes what is missing"
            )
    starts = [start for start, _, _ in ranges]
    return [*starts, ranges[-1][1]], [folder / name for _, _, name in ranges]
