"""The stages index-train and index-add: train the index's clusters and codes on some chunks of the
database, then add the embeddings of all chunks.

Files have upstream's names: ``train_emb/blocks/START-END.hdf5`` contains the embeddings of a block
of training chunks, ``train_emb/train_FRACTION.bin`` those of all blocks, and
``add_codes/START-END.hdf5`` the codes (faiss-par-add) or embeddings (faiss-base) of a block of the
database. All processes compute blocks; the main process builds the index.

Shape suffixes: N chunks or embeddings, M tokens of a chunk, D elements of an embedding, Q query
chunks, K neighbours.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.blocks import (
    FileBlock,
    barrier,
    begin_blocks,
    blocks_of,
    rank,
    run_blocks,
    world_size,
)
from megatron.apps.retro.config import INDEX_TYPES
from megatron.apps.retro.embedding import chunk_texts
from megatron.apps.retro.index import IndexFiles, build_index, existing_files, new_files
from megatron.apps.retro.index.exact import ExactIndex, Nearest, VectorIndex, Vectors
from megatron.apps.retro.index.notation import LEAST_CHUNKS_PER_CLUSTER, IndexParts, index_parts
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.features.retro.chunks import DATASET
from megatron.features.retro.hdf5 import read_array
from megatron.util.digests import digest, sha256_of_file
from megatron.util.files import replacing, sync
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

_DATA, _NEAREST, _DISTANCES = "data", "nearest", "nearest_distances"
"""Arrays in a block's file: its embeddings or codes, and the neighbours of the query chunks among
its chunks, with their distances."""
_CHUNKS_AT_ONCE = 4096
RECALL_AT = (2, 20)
"""Values of k for recall at k: the number of neighbours that a model reads, and the number that
query-neighbors keeps."""
SEARCHED = 4 * max(RECALL_AT)
"""Number of exact neighbours to keep. It is larger than needed, to include ties in distance."""

logger = logging.getLogger(__name__)


def chunk_vectors(
    work: Preprocessing,
    chunks_N: npt.NDArray[np.int64],
    advance: Callable[[int], None] = lambda count: None,
) -> Vectors:
    """Return the embeddings [N, D] of chunks of the database, given their numbers. ``advance`` is
    called with the number of chunks just embedded."""
    vectors_ND = np.empty((len(chunks_N), work.embedder.width), np.float32)
    for start in range(0, len(chunks_N), _CHUNKS_AT_ONCE):
        run = slice(start, start + _CHUNKS_AT_ONCE)
        tokens_NM = work.database.tokens(chunks_N[run])
        vectors_ND[run] = work.embedder.embed(chunk_texts(work.tokenizer, tokens_NM))
        advance(len(tokens_NM))
    return vectors_ND


def train_index(work: Preprocessing) -> None:
    """Write the trained, empty index, or validate its training embeddings. Collective: every
    process must call it. Raises ValueError or OSError if the database is missing or too small, or
    if a file cannot be written."""
    parts = index_parts(work.config, len(work.database), work.embedder.width)
    files = new_files(work.project.index_folder, work.config, parts.text)
    chunks_N = _training_chunks(work, files.train_fraction)

    def make(block: FileBlock) -> dict[str, np.ndarray]:
        return {_DATA: chunk_vectors(work, chunks_N[block.start : block.stop], block.advance)}

    validate = work.config.retro_task_validate
    blocks = blocks_of(files.training / "blocks", len(chunks_N), work.config.retro_block_size)
    finished = files.empty.is_file()
    barrier()  # no process may write while another still lists the files
    if validate is not None:
        run_blocks(blocks, make, "index-train", validate=validate)
        return
    if parts.learned_entries and not finished:
        # report a missing faiss now, not after the embeddings are computed
        build_index(work.config, len(work.database), parts.width)
        _begin_training(work, parts, files, chunks_N)
        run_blocks(blocks, make, "index-train")
    if is_main_process():
        if not finished:
            _learn(work, parts, files, blocks)
        if work.config.retro_index_delete_training_embeddings:
            shutil.rmtree(files.training, ignore_errors=True)
    barrier()


def _training_chunks(work: Preprocessing, fraction: float) -> npt.NDArray[np.int64]:
    """Return the database numbers of the training chunks, the first chunks of each dataset. Raises
    ValueError if the file of training chunks belongs to another database."""
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
    """Return the first row of a dataset, or of the next one if it has no rows. A binary search
    reads only a few rows of the table."""
    return bisect_left(table, dataset, key=lambda row: row[DATASET])


def _begin_training(
    work: Preprocessing, parts: IndexParts, files: IndexFiles, chunks_N: npt.NDArray[np.int64]
) -> None:
    """Check that there are enough training chunks, and delete an earlier run's outdated blocks."""
    count = len(chunks_N)
    parts.check_training(count)
    if is_main_process():
        enough = LEAST_CHUNKS_PER_CLUSTER * parts.learned_entries
        if count < enough:
            logger.warning(
                "--retro-index-str %s learns from %d chunks; %d or more make better clusters "
                "(--retro-index-ntrain, db-build)",
                parts.text,
                count,
                enough,
            )
        made_of = {"chunks": digest(chunks_N.data), "embedder": dict(work.embedder.identity)}
        begin_blocks(files.training, made_of)
    barrier()


def _learn(
    work: Preprocessing, parts: IndexParts, files: IndexFiles, blocks: Sequence[FileBlock]
) -> None:
    """Train the index, and write it without any vectors."""
    files.index_folder.mkdir(parents=True, exist_ok=True)
    index = build_index(work.config, len(work.database), parts.width)
    if parts.learned_entries:
        _merge(files.training_vectors, blocks, parts.width)
        vectors_ND = np.memmap(files.training_vectors, np.float32, "r").reshape(-1, parts.width)
        say(f"index-train: {parts.text} learns from {len(vectors_ND):,} chunks")
        index.train(vectors_ND)
    index.save(files.empty)
    say(f"index-train: {files.empty}")


def _merge(path: Path, blocks: Sequence[FileBlock], width: int) -> None:
    """Write the embeddings of all blocks into one file, unless it exists."""
    size = 4 * width * sum(len(block) for block in blocks)
    if path.is_file() and os.path.getsize(path) == size:
        return
    with replacing(path) as part, part.open("xb") as file:
        for block in progress_bar("index-train: merging", blocks, unit=" blocks"):
            file.write(np.ascontiguousarray(read_array(block.path, _DATA), np.float32).data)
        sync(file)


def add_to_index(work: Preprocessing) -> None:
    """Write the index of the database, or validate it. Collective: every process must call it.
    Raises ValueError or OSError if an earlier stage is missing, or if a file cannot be read or
    written."""
    _Adding(work).run()


class _Adding:
    """One execution of the stage index-add."""

    def __init__(self, work: Preprocessing) -> None:
        self._work, self._config = work, work.config
        self._files = existing_files(work.project.index_folder, work.config, "index-train")
        self._flags = dataclasses.replace(work.config, retro_index_str=self._files.text)
        self._count = int(self._files.add_fraction * len(work.database))
        self._width = work.embedder.width
        self._parts = index_parts(self._flags, self._count, self._width)
        self._blocks = blocks_of(self._files.codes, self._count, work.config.retro_block_size)
        queries = 0 if self._parts.is_exact else work.config.retro_index_recall_queries
        queries = min(queries, self._count)
        self._queries_Q = np.arange(queries, dtype=np.int64) * self._count // max(queries, 1)
        """Numbers of the query chunks, spread over the database, for which recall is measured."""

    def run(self) -> None:
        described = self._files.read_description()
        barrier()  # no process may write while another still lists the files
        if self._config.retro_task_validate is not None:
            self._validate(self._config.retro_task_validate, described)
            return
        if described is None:
            self._begin()
            run_blocks(self._blocks, self._block_arrays, "index-add")
        if is_main_process():
            if described is None:
                self._finish()
            else:
                self._compare(described)
            if self._config.retro_index_delete_added_codes:
                shutil.rmtree(self._files.codes, ignore_errors=True)
        barrier()

    def _begin(self) -> None:
        """Delete an earlier run's outdated blocks."""
        if is_main_process():
            made_of = {
                "empty": sha256_of_file(self._files.empty),
                "chunks": self._count,
                "recall_queries": len(self._queries_Q),
            }
            begin_blocks(self._files.codes, made_of)
        barrier()

    @cached_property
    def _empty(self) -> VectorIndex:
        return self._opened(self._files.empty)

    @cached_property
    def _query_vectors_QD(self) -> Vectors:
        return chunk_vectors(self._work, self._queries_Q)

    def _opened(self, path: Path) -> VectorIndex:
        index = build_index(self._flags, self._count, self._width)
        index.load(path)
        return index

    def _block_arrays(self, block: FileBlock) -> dict[str, np.ndarray]:
        """Return a block's embeddings or codes, and the queries' exact neighbours among its chunks.
        Searching for them here avoids a second pass over the database, and uses all processes."""
        chunks_N = np.arange(block.start, block.stop)
        vectors_ND = chunk_vectors(self._work, chunks_N, block.advance)
        encoded = self._files.type == INDEX_TYPES[0]
        arrays: dict[str, np.ndarray] = {
            _DATA: self._empty.encode(vectors_ND) if encoded else vectors_ND
        }
        if len(self._queries_Q):
            index = ExactIndex(self._width)
            index.add(vectors_ND)
            numbers_QK, distances_QK = index.search(self._query_vectors_QD, SEARCHED)
            arrays[_NEAREST] = np.where(numbers_QK >= 0, numbers_QK + block.start, -1)
            arrays[_DISTANCES] = distances_QK
        return arrays

    def _finish(self) -> None:
        """Add all blocks to the index, write it, and measure its recall."""
        files, index = self._files, self._empty
        for block in progress_bar("index-add: adding", self._blocks, unit=" blocks"):
            data = read_array(block.path, _DATA)
            if files.type == INDEX_TYPES[0]:
                index.add_codes(data)
            else:
                index.add(data)
        index.save(files.added)
        recall = self._recall(index) if len(self._queries_Q) else {}
        files.write_description(self._description() | {"recall": recall})
        size = files.added.stat().st_size
        say(f"index-add: {self._count:,} chunks, {size:,} bytes: {files.added}")
        say(f"index-add: {self._search(recall)}")

    def _recall(self, index: VectorIndex) -> dict[int, float]:
        """Return, for each k of :data:`RECALL_AT`, the fraction of the queries' k exact neighbours
        that the index finds."""
        numbers, distances = (
            np.concatenate([read_array(block.path, name) for block in self._blocks], axis=1)
            for name in (_NEAREST, _DISTANCES)
        )
        nearest = nearest_others(self._queries_Q, numbers, distances)
        first_QK, _ = index.search(self._query_vectors_QD, max(RECALL_AT) + 1)
        return recall_at(*nearest, without_own(self._queries_Q, first_QK))

    def _search(self, recall: dict[int, float]) -> str:
        """Return a description of the search and its recall for the log."""
        if self._parts.is_exact:
            return "the search is exact"
        clusters = self._parts.clusters or 1
        searched = f"{self._parts.probes(self._flags):,} of {clusters:,} clusters are searched"
        if not recall:
            return f"{searched} (--retro-query-nprobe); the recall was not measured"
        shares = ", ".join(f"{share:.3f} at {k}" for k, share in recall.items())
        return (
            f"recall {shares}, of {len(self._queries_Q):,} chunks; "
            f"{searched} (--retro-query-nprobe)"
        )

    def _description(self) -> dict[str, Any]:
        return {
            "index": self._files.text,
            "chunks": self._count,
            "width": self._width,
            "embedder": dict(self._work.embedder.identity),
            "clusters_searched": self._parts.probes(self._flags),
        }

    def _compare(self, described: dict[str, Any]) -> None:
        """Raise ValueError if the finished index belongs to another database or embedder."""
        expected = json.loads(json.dumps(self._description()))
        for key in ("chunks", "width", "embedder"):
            if described.get(key) != expected[key]:
                raise ValueError(
                    f"{self._files.added} has {key} {described.get(key)}, not {expected[key]}: "
                    f"delete {self._files.index_folder} and run index-train and index-add again"
                )
        say(f"index-add: {self._files.added} exists")

    def _validate(self, share: float, described: dict[str, Any] | None) -> None:
        """Embed a fraction of the blocks again. Raises ValueError if the index has others."""
        if described is None:  # index-add has not finished: compare its block files
            run_blocks(self._blocks, self._block_arrays, "index-add", validate=share)
            return
        index = self._opened(self._files.added)
        count = max(round(share * len(self._blocks)), min(1, len(self._blocks)))
        chosen = [self._blocks[i * len(self._blocks) // count] for i in range(count)]
        for block in chosen[rank() :: world_size()]:
            vectors_ND = chunk_vectors(self._work, np.arange(block.start, block.stop))
            if not index.holds(block.start, self._empty.encode(vectors_ND)):
                raise ValueError(
                    f"{self._files.added}: chunks {block.start} to {block.stop - 1} are not what "
                    f"this run computes; delete {self._files.index_folder} and run index-train and "
                    "index-add again"
                )
        barrier()
        if is_main_process():
            say(f"index-add: {count} of {len(self._blocks)} blocks made again, all equal")


def nearest_others(
    chunks_Q: npt.NDArray[np.int64],
    numbers_QN: npt.NDArray[np.int64],
    distances_QN: npt.NDArray[np.float32],
) -> Nearest:
    """Return the nearest neighbours of each query chunk, in order. The chunk itself is replaced by
    -1, which sorts last."""
    numbers_QN = np.where(numbers_QN == chunks_Q[:, None], -1, numbers_QN)
    distances_QN = np.where(numbers_QN < 0, np.float32(np.inf), distances_QN)
    order = np.lexsort((numbers_QN, distances_QN))[:, :SEARCHED]
    return np.take_along_axis(numbers_QN, order, 1), np.take_along_axis(distances_QN, order, 1)


def without_own(
    chunks_Q: npt.NDArray[np.int64], numbers_QN: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the first max(RECALL_AT) numbers of each row, without the query chunk itself."""
    order = np.argsort(numbers_QN == chunks_Q[:, None], axis=1, kind="stable")
    return np.take_along_axis(numbers_QN, order[:, : max(RECALL_AT)], axis=1)


def recall_at(
    exact_QN: npt.NDArray[np.int64],
    distances_QN: npt.NDArray[np.float32],
    first_QK: npt.NDArray[np.int64],
) -> dict[int, float]:
    """Return, for each k of :data:`RECALL_AT`, the fraction of the k exact nearest neighbours
    (``exact_QN``, with ``distances_QN``) that are among the first k results of an index
    (``first_QK``). Ties at the k-th distance count as hits, too; -1 is not a neighbour."""
    shares = {}
    for k in RECALL_AT:
        last_Q1 = distances_QN[:, min(k, exact_QN.shape[1]) - 1, None]
        near_QN = (exact_QN >= 0) & (distances_QN <= last_Q1)
        hits_QKN = (first_QK[:, :k, None] == exact_QN[:, None]) & near_QN[:, None]
        most = np.minimum((exact_QN >= 0).sum(1), k).sum()
        shares[k] = float(hits_QKN.sum() / max(most, 1))
    return shares
