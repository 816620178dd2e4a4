"""Stage query-neighbors: the neighbours of the chunks of the GPT's samples, in files for training.

Shape suffixes: N chunks of samples, K neighbours that are kept.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.retro.blocks import (
    FileBlock,
    blocks_of,
    run_blocks,
)
from megatron.apps.retro.gpt_samples import SampleChunks, gpt_samples
from megatron.apps.retro.index import index_file
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.apps.retro.query.retriever import Retriever
from megatron.config import ConfigError
from megatron.data.index_cache import digest_of
from megatron.data.sources import PARTS
from megatron.features.retro.neighbors import DATASET
from megatron.features.retro.project import GPT, RetroProject
from megatron.util.digests import digest
from megatron.util.processes import is_main_process
from megatron.util.progress import say

NEIGHBOR_DIRS = "retro_neighbor_dirs"
_CHUNKS_AT_ONCE = 4096
"""Embedded and searched for together; memory does not depend on the size of blocks."""


def query_neighbors(work: Preprocessing) -> None:
    """Writes the neighbours of the samples of training, validation and test, and names their
    folders in the project's configuration. Raises ValueError or OSError if an earlier stage is
    missing, or a file cannot be read or written."""
    project, config = work.project, work.config
    searched, kept = config.retro_query_num_neighbors_query, config.retro_query_num_neighbors_save
    if kept > searched:
        raise ConfigError(
            f"--retro-query-num-neighbors-save {kept} is more than "
            f"--retro-query-num-neighbors-query {searched}: search for at least as many as are kept"
        )
    retriever = Retriever(project, work.embedder, searched, config)
    numbers = retriever.database.numbers
    per_sample = project.seq_length // project.chunk_length
    folders: dict[str, str | None] = dict.fromkeys(PARTS)
    for part, samples in gpt_samples(work.run).items():
        chunks = SampleChunks(samples, per_sample, project.chunk_length, numbers)
        name = digest(json.dumps(_description(work, retriever, part, len(chunks)), sort_keys=True))
        folder = project.query_folder / f"{part}_{name}"
        folders[part] = folder.name  # relative to the folder of queries, as upstream reads it
        if config.retro_task_validate is not None:
            _check_search(project, part, folder)
        run_blocks(
            blocks_of(folder, len(chunks), config.retro_block_size),
            partial(neighbors_of, chunks, retriever, kept),
            f"query-neighbors: {part}",
            validate=config.retro_task_validate,
        )
        if is_main_process() and config.retro_task_validate is None:
            say(f"query-neighbors: {part}, {samples.count:,} samples: {folder}")
    if config.retro_task_validate is None:
        project.record({NEIGHBOR_DIRS: folders})


def _check_search(project: RetroProject, part: str, folder: Path) -> None:
    """ConfigError if the neighbours of a part are not those of the search that ``folder`` is of."""
    recorded = (project.settings.get(NEIGHBOR_DIRS) or {}).get(part)
    if recorded is not None and not folder.is_dir():
        known = project.query_folder / Path(recorded).name
        raise ConfigError(
            f"--retro-task-validate: {known} is of another search than this run's; give the flags "
            "that it was made with (--retro-query-..., --retro-block-size), or, if these are the "
            "same, the database or the index has changed: run the stages again without "
            "--retro-task-validate"
        )


def neighbors_of(
    chunks: SampleChunks, retriever: Retriever, kept: int, block: FileBlock
) -> dict[str, np.ndarray]:
    """The array of a block's file: the neighbours of its chunks, int64 [N, kept], without those of
    the documents of their sample."""
    found_NK = np.empty((len(block), kept), np.int64)
    for start in range(block.start, block.stop, _CHUNKS_AT_ONCE):
        stop = min(start + _CHUNKS_AT_ONCE, block.stop)
        tokens_NM, documents = chunks.read(start, stop)
        found_NK[start - block.start : stop - block.start] = retriever.neighbors(
            tokens_NM, kept, exclude=documents
        )
        block.advance(stop - start)
    return {DATASET: found_NK}


def _description(
    work: Preprocessing, retriever: Retriever, part: str, count: int
) -> dict[str, Any]:
    """Everything that the neighbours of a part depend on, for the name of their folder."""
    config, settings = work.config, work.project.settings
    index = np.memmap(index_file(work.project, config), np.uint8, "r")
    return {
        "part": part,
        "chunks": count,
        "data": {key: value for key, value in settings.items() if key.startswith(GPT)},
        "database": digest_of(retriever.database.table),
        "embedder": dict(work.embedder.identity),
        "index": digest_of(index),
        "search": [config.retro_query_nprobe, config.retro_query_ef_search],
        "searched": config.retro_query_num_neighbors_query,
        "kept": config.retro_query_num_neighbors_save,
        "block": config.retro_block_size,
    }
