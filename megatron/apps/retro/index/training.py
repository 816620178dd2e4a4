"""Stage index-train: the clusters and codes of the index, learned from some of the chunks.

Upstream's files: ``train_emb/blocks/START-END.hdf5`` with the vectors of a block of chunks,
``train_emb/train_FRACTION.bin`` with all, and the empty index.
"""

from __future__ import annotations

import logging
import os
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.blocks import (
    FileBlock,
    barrier,
    begin_blocks,
    blocks_of,
    run_blocks,
)
from megatron.apps.retro.index import build_index
from megatron.apps.retro.index.files import IndexFiles, new_files
from megatron.apps.retro.index.strings import (
    LEAST_CHUNKS_PER_CLUSTER,
    IndexParts,
    index_parts,
)
from megatron.apps.retro.index.vectors import chunk_vectors
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.features.retro.chunks import DATASET
from megatron.features.retro.hdf5 import read_array
from megatron.util.digests import digest
from megatron.util.files import replacing, sync
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

logger = logging.getLogger(__name__)

DATA = "data"
"""Name of the vectors, or codes, in the file of a block."""


def train_index(work: Preprocessing) -> None:
    """Writes the empty index, or validates the vectors that it learned from. Raises ValueError or
    OSError if the database is missing or too small for the index, or a file cannot be written."""
    parts = index_parts(work.config, len(work.database), work.embedder.width)
    files = new_files(work.project.index_folder, work.config, parts.text)
    chunks_N = _training_chunks(work, files.train_fraction)

    def make(block: FileBlock) -> dict[str, np.ndarray]:
        return {DATA: chunk_vectors(work, chunks_N[block.start : block.stop], block.advance)}

    validate = work.config.retro_task_validate
    blocks = blocks_of(files.training / "blocks", len(chunks_N), work.config.retro_block_size)
    finished = files.empty.is_file()
    barrier()  # nobody writes while all look
    if validate is not None:
        run_blocks(blocks, make, "index-train", validate=validate)
        return
    if parts.learned_entries and not finished:
        build_index(work.config, len(work.database), parts.width)  # needs faiss: not at the end
        _begin(work, parts, files, chunks_N)
        run_blocks(blocks, make, "index-train")
    if is_main_process():
        if not finished:
            _learn(work, parts, files, blocks)
        if work.config.retro_index_delete_training_embeddings:
            shutil.rmtree(files.training, ignore_errors=True)
    barrier()


def _training_chunks(work: Preprocessing, fraction: float) -> npt.NDArray[np.int64]:
    """The chunks to learn from, by their number in the database: of each dataset the first ones.
    ValueError if they are of another database."""
    database = work.database
    path = work.project.database_folder / "merged" / "sampled.hdf5"
    sampled = read_array(path, "chunks")
    runs = []
    for dataset in range(len(database.sources)):
        first, stop = (_first_row(sampled, number) for number in (dataset, dataset + 1))
        runs.append(np.arange(stop - first) + _first_row(database.table, dataset))
    chunks_N = np.concatenate(runs)
    last = chunks_N[-1:]
    if len(last) and not np.array_equal(database.table[last], sampled[-1:]):
        raise ValueError(f"{path} is not of {work.project.database_file}; run db-build again")
    return chunks_N[: int(fraction * len(chunks_N))]


def _first_row(table: npt.NDArray[np.uint32], dataset: int) -> int:
    """The first row of a dataset or a later one; of a table of any size few rows are read."""
    return bisect_left(table, dataset, key=lambda row: row[DATASET])


def _begin(
    work: Preprocessing, parts: IndexParts, files: IndexFiles, chunks_N: npt.NDArray[np.int64]
) -> None:
    """Checks that there is enough to learn from, and that blocks of an earlier run fit."""
    count = len(chunks_N)
    parts.check_training(count)
    if is_main_process():
        wanted = LEAST_CHUNKS_PER_CLUSTER * parts.learned_entries
        if count < wanted:
            logger.warning(
                "--retro-index-str %s learns from %d chunks; %d or more make better clusters "
                "(--retro-index-ntrain, db-build)",
                parts.text,
                count,
                wanted,
            )
        made_of = {"chunks": digest(chunks_N.data), "embedder": dict(work.embedder.identity)}
        begin_blocks(files.training, made_of)
    barrier()


def _learn(
    work: Preprocessing, parts: IndexParts, files: IndexFiles, blocks: Sequence[FileBlock]
) -> None:
    """Writes the empty index."""
    files.own.mkdir(parents=True, exist_ok=True)
    index = build_index(work.config, len(work.database), parts.width)
    if parts.learned_entries:
        _merge(files.training_vectors, blocks, parts.width)
        vectors_ND = np.memmap(files.training_vectors, np.float32, "r").reshape(-1, parts.width)
        say(f"index-train: {parts.text} learns from {len(vectors_ND):,} chunks")
        index.train(vectors_ND)
    index.save(files.empty)
    say(f"index-train: {files.empty}")


def _merge(path: Path, blocks: Sequence[FileBlock], width: int) -> None:
    """Writes the vectors of all blocks into one file, unless it exists."""
    size = 4 * width * sum(len(block) for block in blocks)
    if path.is_file() and os.path.getsize(path) == size:
        return
    with replacing(path) as part, part.open("xb") as file:
        for block in progress_bar("index-train: merging", blocks, unit=" blocks"):
            file.write(np.ascontiguousarray(read_array(block.path, DATA), np.float32).data)
        sync(file)
