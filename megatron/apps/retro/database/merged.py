"""The merged files of a database, of the chunks of all its datasets.

``train.hdf5`` has the chunks of the training documents, whose numbers are those of neighbours;
``sampled.hdf5`` the first of each dataset, which the index learns from; ``valid.hdf5`` those of the
documents that follow. ``indexed_dataset_infos.json`` lists the datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.apps.retro.blocks import (
    FileBlock,
    differing,
    naming_full_disks,
)
from megatron.apps.retro.database.datasets import (
    CHUNKS,
    EMPTY,
    OFFSETS,
    STAGE,
    Dataset,
)
from megatron.apps.retro.index.strings import training_chunks
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.config import ConfigError
from megatron.features.retro.hdf5 import (
    Layout,
    array_shapes,
    read_array,
    writing,
)
from megatron.features.retro.project import (
    RetroProject,
    dataset_identity,
    write_json,
)
from megatron.util.progress import say

MOST = 2**32
"""Numbers that the format's 32 bits tell apart."""


class MergedPart(NamedTuple):
    """What a merged file has of a dataset's blocks."""

    file: str
    chunks: str
    """The key of their number in the list of datasets."""
    trained: bool
    """Whether it has the chunks of training documents, or of the others."""
    offsets: bool
    """Whether it has the offsets of the documents."""


PARTS = (
    MergedPart("train", "n_chunks_train", True, True),
    MergedPart("sampled", "n_chunks_sampled", True, False),
    MergedPart("valid", "n_chunks_valid", False, False),
)

Info = dict[str, Any]
"""The entry of a dataset in the list."""


def merge(work: Preprocessing, datasets: list[Dataset], compare: bool) -> None:
    """Writes the merged files and the list of datasets, or with ``compare`` reads them and compares
    them bit for bit. Raises ValueError if they differ, or there are no chunks; OSError if they
    cannot be written."""
    infos = [_counted(dataset, work.project) for dataset in datasets]
    total = sum(info["n_chunks_train"] for info in infos)
    if not total:
        raise ConfigError(
            "the training documents have no chunk with text for the embedder: give other data, or "
            "another --bert-embedder-type"
        )
    if max(total, *(dataset.trained.stop for dataset in datasets)) >= MOST:
        raise ConfigError(f"{total} chunks: chunks and documents must be fewer than 2**32")
    for info, count in zip(infos, _sampled(work, datasets, total), strict=True):
        info["n_chunks_sampled"] = min(count, info["n_chunks_train"])
    folder = work.project.database_folder / "merged"
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        path = folder / f"{part.file}.hdf5"
        if compare:
            _compare(path, datasets, infos, part)
        else:
            with naming_full_disks(path, STAGE):
                _write(path, datasets, infos, part)
    if compare:
        return
    with naming_full_disks(work.project.datasets_file, STAGE):
        write_json(work.project.datasets_file, infos)  # last: with it the database is complete
    documents = sum(info["n_docs_train"] for info in infos)
    empty = sum(info["n_chunks_invalid"] for info in infos)
    say(f"{STAGE}: {total:,} chunks of {documents:,} documents; {empty:,} without text left out")


def _sampled(work: Preprocessing, datasets: list[Dataset], total: int) -> list[int]:
    """Chunks of each dataset that an index learns from: by its weight, as the flag says, or as
    before."""
    if work.config.retro_index_ntrain is None and work.project.datasets_file.exists():
        return [info["n_chunks_sampled"] for info in work.project.dataset_infos()]
    wanted = training_chunks(work.config, total, work.embedder.width)
    return [max(1, int(wanted * dataset.weight)) for dataset in datasets]


def _counted(dataset: Dataset, project: RetroProject) -> Info:
    """The entry of a dataset, without the chunks that an index learns from."""
    chunks = trained = empty = 0
    for block in dataset.blocks:
        shapes = array_shapes(block.path)
        chunks += shapes[CHUNKS][0]
        empty += shapes[EMPTY][0]
        trained += len(_rows(dataset, block, True)[0])
    return {
        "prefix": project.data_word(dataset.prefix),
        "source": dataset.source,
        "name": dataset.name,
        "ratio": dataset.weight,
        "n_docs": len(dataset.documents),
        "n_docs_train": len(dataset.trained),
        "n_chunks": chunks,
        "n_chunks_train": trained,
        "n_chunks_valid": chunks - trained,
        "n_chunks_invalid": empty,
        **dataset_identity(dataset.documents),
    }


def _rows(dataset: Dataset, block: FileBlock, trained: bool) -> tuple[np.ndarray, np.ndarray]:
    """The chunks of a block's documents that are for training, or of the others, and the offsets of
    the former."""
    chunks, offsets = read_array(block.path, CHUNKS), read_array(block.path, OFFSETS)
    stop = np.searchsorted(chunks[:, 0], dataset.trained.stop)
    last = np.searchsorted(offsets[:, 0], dataset.trained.stop)
    return chunks[:stop] if trained else chunks[stop:], offsets[:last]


def _merged(
    datasets: list[Dataset], infos: list[Info], part: MergedPart
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of a merged file, block by block: chunks, uint32 [n, 5], and offsets, uint64
    [d, 3]."""
    written = 0
    for dataset, info in zip(datasets, infos, strict=True):
        left = info[part.chunks]
        for block in dataset.blocks:
            chunks, offsets = _rows(dataset, block, part.trained)
            chunks = chunks[:left]
            numbered = partial(_numbered, dataset.number)
            yield numbered(chunks), numbered(offsets + np.array([0, written], np.uint64))
            left -= len(chunks)
            written += len(chunks)


def _numbered(dataset: int, rows: np.ndarray) -> np.ndarray:
    """Rows with the number of their dataset in front."""
    return np.column_stack([np.full(len(rows), dataset, rows.dtype), rows])


def _write(path: Path, datasets: list[Dataset], infos: list[Info], part: MergedPart) -> None:
    """Writes a merged file."""
    total = sum(info[part.chunks] for info in infos)
    documents = sum(info["n_docs_train"] for info in infos)
    layout: Layout = {
        "chunks": (np.dtype("u4"), (total, 5)),
        "n_written": (np.dtype("u8"), (1,)),
        **({OFFSETS: (np.dtype("u8"), (documents, 3))} if part.offsets else {}),
    }
    with writing(path, layout) as files:
        for rows, offsets in _merged(datasets, infos, part):
            files["chunks"].append(rows)
            if part.offsets:
                files[OFFSETS].append(offsets)
        files["n_written"].append(np.array([total]))


def _compare(path: Path, datasets: list[Dataset], infos: list[Info], part: MergedPart) -> None:
    """ValueError if a merged file is not what the blocks make."""
    chunks = read_array(path, "chunks")
    ends = read_array(path, OFFSETS) if part.offsets else None
    row = document = 0
    for rows, offsets in _merged(datasets, infos, part):
        if not np.array_equal(chunks[row : row + len(rows)], rows):
            raise differing(path, "chunks")
        row += len(rows)
        if ends is not None and not np.array_equal(
            ends[document : document + len(offsets)], offsets
        ):
            raise differing(path, OFFSETS)
        document += len(offsets)
    if len(chunks) != row or read_array(path, "n_written").tolist() != [row]:
        raise differing(path, "n_written")
