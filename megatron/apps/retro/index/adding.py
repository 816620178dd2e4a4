"""Stage index-add: the vectors of all chunks of the database, in the index.

Every process embeds blocks of chunks, and writes their codes (faiss-par-add) or vectors
(faiss-base) into ``add_codes/START-END.hdf5``; the main one adds them to the index.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.retro.blocks import (
    FileBlock,
    barrier,
    begin_blocks,
    blocks_of,
    rank,
    run_blocks,
    world_size,
)
from megatron.apps.retro.index import build_index
from megatron.apps.retro.index.config import INDEX_TYPES
from megatron.apps.retro.index.files import IndexFiles, existing_files
from megatron.apps.retro.index.recall import RecallSample
from megatron.apps.retro.index.strings import index_parts
from megatron.apps.retro.index.training import DATA
from megatron.apps.retro.index.vector_index import VectorIndex
from megatron.apps.retro.index.vectors import chunk_vectors
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.features.retro.hdf5 import read_array
from megatron.util.digests import sha256_of_file
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say


def add_to_index(work: Preprocessing) -> None:
    """Writes the index of the database, or validates it. Raises ValueError or OSError if an earlier
    stage is missing, or a file cannot be read or written."""
    _Adding(work).run()


class _Adding:
    """A run of the stage."""

    def __init__(self, work: Preprocessing) -> None:
        self._work, self._config = work, work.config
        files = existing_files(work.project.index_folder, work.config, "index-train")
        self._files: IndexFiles = files
        self._flags = dataclasses.replace(work.config, retro_index_str=files.text)
        self._count = int(files.add_fraction * len(work.database))
        self._width = work.embedder.width
        self._parts = index_parts(self._flags, self._count, self._width)
        self._blocks = blocks_of(files.codes, self._count, work.config.retro_block_size)
        queries = 0 if self._parts.is_exact else work.config.retro_index_recall_queries
        self._sample = RecallSample(work, self._count, queries)

    def run(self) -> None:
        described = self._files.read_description()
        barrier()  # nobody writes while all look
        if self._config.retro_task_validate is not None:
            self._validate(self._config.retro_task_validate, described)
            return
        if described is None:
            self._begin()
            run_blocks(self._blocks, self._made, "index-add")
        if is_main_process():
            if described is None:
                self._finish()
            else:
                self._compare(described)
            if self._config.retro_index_delete_added_codes:
                shutil.rmtree(self._files.codes, ignore_errors=True)
        barrier()

    def _begin(self) -> None:
        """Sees that blocks of an earlier run fit."""
        if is_main_process():
            made_of = {
                "empty": sha256_of_file(self._files.empty),
                "chunks": self._count,
                "recall_queries": len(self._sample.chunks_Q),
            }
            begin_blocks(self._files.codes, made_of)
        barrier()

    @cached_property
    def _empty(self) -> VectorIndex:
        return self._opened(self._files.empty)

    def _opened(self, path: Path) -> VectorIndex:
        index = build_index(self._flags, self._count, self._width)
        index.load(path)
        return index

    def _made(self, block: FileBlock) -> dict[str, np.ndarray]:
        """The file of a block."""
        chunks_N = np.arange(block.start, block.stop)
        vectors_ND = chunk_vectors(self._work, chunks_N, block.advance)
        found: dict[str, np.ndarray] = {DATA: vectors_ND}
        if self._files.type == INDEX_TYPES[0]:
            found[DATA] = self._empty.encode(vectors_ND)
        if len(self._sample.chunks_Q):
            found |= self._sample.nearest(block.start, vectors_ND)
        return found

    def _finish(self) -> None:
        """Adds the blocks to the index, and measures how much it finds."""
        files, index = self._files, self._empty
        for block in progress_bar("index-add: adding", self._blocks, unit=" blocks"):
            data = read_array(block.path, DATA)
            if files.type == INDEX_TYPES[0]:
                index.add_codes(data)
            else:
                index.add(data)
        index.save(files.added)
        recall = {}
        if len(self._sample.chunks_Q):
            recall = self._sample.recall(index, [block.path for block in self._blocks])
        files.write_description(self._description() | {"recall": recall})
        size = files.added.stat().st_size
        say(f"index-add: {self._count:,} chunks, {size:,} bytes: {files.added}")
        say(f"index-add: {self._search(recall)}")

    def _search(self, recall: dict[int, float]) -> str:
        """How much the index finds, in words."""
        if self._parts.is_exact:
            return "the search is exact"
        clusters = self._parts.clusters or 1
        searched = f"{self._parts.probes(self._flags):,} of {clusters:,} clusters are searched"
        if not recall:
            return f"{searched} (--retro-query-nprobe); the recall was not measured"
        shares = ", ".join(f"{share:.3f} at {k}" for k, share in recall.items())
        return (
            f"recall {shares}, of {len(self._sample.chunks_Q):,} chunks; "
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
        """ValueError if the finished index is not of this database and embedder."""
        expected = json.loads(json.dumps(self._description()))
        for key in ("chunks", "width", "embedder"):
            if described.get(key) != expected[key]:
                raise ValueError(
                    f"{self._files.added} has {key} {described.get(key)}, not {expected[key]}: "
                    f"delete {self._files.own} and run index-train and index-add again"
                )
        say(f"index-add: {self._files.added} exists")

    def _validate(self, share: float, described: dict[str, Any] | None) -> None:
        """Embeds a share of the blocks again. ValueError if the index has something else."""
        if described is None:  # killed before its end
            run_blocks(self._blocks, self._made, "index-add", validate=share)
            return
        index = self._opened(self._files.added)
        count = max(round(share * len(self._blocks)), min(1, len(self._blocks)))
        chosen = [self._blocks[i * len(self._blocks) // count] for i in range(count)]
        for block in chosen[rank() :: world_size()]:
            vectors_ND = chunk_vectors(self._work, np.arange(block.start, block.stop))
            if not index.holds(block.start, self._empty.encode(vectors_ND)):
                raise ValueError(
                    f"{self._files.added}: chunks {block.start} to {block.stop - 1} are not what "
                    f"this run computes; delete {self._files.own} and run index-train and "
                    "index-add again"
                )
        barrier()
        if is_main_process():
            say(f"index-add: {count} of {len(self._blocks)} blocks made again, all equal")
