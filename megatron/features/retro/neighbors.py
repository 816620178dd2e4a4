"""The neighbours of the samples of a part, from the files of a project.

Upstream's layout: ``query/PART_HASH/START-END.hdf5``, each with a dataset ``neighbors``, int64
[END - START, kept]: the numbers of database chunks, nearest first, -1 where there are fewer. Row r
belongs to chunk r % L of sample r // L, so that a sample's rows may begin in one file and end in
the next.
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

from megatron.data.samples import checked_index
from megatron.features.retro.hdf5 import read_array

DATASET = "neighbors"
STAGE = "query-pretraining-neighbors"
_NAME = re.compile(r"(\d+)-(\d+)\.hdf5")
_FILES_READ = 4
"""Files that cannot be mapped and are kept in memory."""


class NeighborTable:
    """The neighbours of every chunk of every sample of a part. Raises ValueError if files are
    missing, or are not those of samples of ``chunks_per_sample`` chunks (L)."""

    def __init__(self, folder: str | Path, chunks_per_sample: int) -> None:
        self.folder = Path(folder)
        self.chunks_per_sample = chunks_per_sample
        self._starts, self._files = _files_of(self.folder)
        self._mapped: dict[int, np.ndarray] = {}
        self._read: dict[int, np.ndarray] = {}
        rows = self._starts[-1]
        if chunks_per_sample < 1 or rows % chunks_per_sample:
            raise ValueError(
                f"{self.folder} has the neighbours of {rows} chunks, which are no whole samples of "
                f"{chunks_per_sample} chunks: it was made for another --retro-gpt-seq-length or "
                f"--retro-gpt-chunk-length; delete it and run the stage {STAGE} again"
            )

    def __len__(self) -> int:
        """Number of samples."""
        return self._starts[-1] // self.chunks_per_sample

    @cached_property
    def kept(self) -> int:
        """Neighbours of a chunk in the files."""
        return int(self._file(0).shape[1])

    def rows(self, sample: int) -> npt.NDArray[np.int64]:
        """Numbers of the database chunks that are nearest to each chunk of a sample, nearest first,
        [L, kept]; -1 where there are fewer. Raises IndexError for a sample that does not exist,
        ValueError if a file is damaged."""
        first = checked_index(sample, len(self)) * self.chunks_per_sample
        return self.chunk_rows(first, first + self.chunks_per_sample)

    def chunk_rows(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """:meth:`rows` of the chunks ``first`` up to ``stop``, counted over all samples."""
        found = np.empty((stop - first, self.kept), np.int64)
        row = first
        while row < stop:
            number = bisect.bisect_right(self._starts, row) - 1
            start, end = self._starts[number], min(self._starts[number + 1], stop)
            found[row - first : end - first] = self._file(number)[row - start : end - start]
            row = end
        return found

    def _file(self, number: int) -> np.ndarray:
        if number in self._mapped:
            return self._mapped[number]
        if number in self._read:
            return self._read[number]
        path = self._files[number]
        array = read_array(path, DATASET)
        rows = self._starts[number + 1] - self._starts[number]
        kept = array.shape[1] if number == 0 and array.ndim == 2 else self.kept
        if array.dtype != np.int64 or array.shape != (rows, kept):
            raise ValueError(
                f"{path}: {DATASET} is {array.dtype} {list(array.shape)}, not int64 "
                f"{[rows, kept]}; delete the file and run the stage {STAGE} again"
            )
        if not array.flags.owndata:
            self._mapped[number] = array
            return array
        while len(self._read) >= _FILES_READ:
            del self._read[next(iter(self._read))]
        self._read[number] = array
        return array

    def __getstate__(self) -> dict[str, Any]:
        """Without the files' content: a worker process opens those that it reads."""
        return self.__dict__ | {"_mapped": {}, "_read": {}}


def _files_of(folder: Path) -> tuple[list[int], Sequence[Path]]:
    """The first rows of a folder's files, followed by the number of rows, and the files. Raises
    ValueError if there are no files, or rows are missing or in several of them."""
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    ranges = sorted(
        (int(found[1]), int(found[2]), found[0]) for found in map(_NAME.fullmatch, names) if found
    )
    if not ranges:
        raise ValueError(
            f"{folder} has no neighbours: run tools/retro/preprocess_data.py --retro-tasks {STAGE}"
        )
    for (_, stop, name), (start, _, following) in pairwise([(0, 0, "row 0"), *ranges]):
        if start != stop:
            what = "missing" if start > stop else "in several files"
            raise ValueError(
                f"{folder}: rows between {name} and {following} are {what}; run the stage {STAGE} "
                "again, which finishes what is missing"
            )
    starts = [start for start, _, _ in ranges]
    return [*starts, ranges[-1][1]], [folder / name for _, _, name in ranges]
