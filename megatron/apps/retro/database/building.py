"""The stage db-build: the chunks of the training documents, in upstream's files in ``db/``.

``individual/NAME/START-END.hdf5`` has the chunks of a block of documents of a dataset. The files of
``merged/`` have those of all datasets (:mod:`megatron.apps.retro.database.merged`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.blocks import (
    FileBlock,
    barrier,
    begin_blocks,
    run_blocks,
)
from megatron.apps.retro.database.datasets import (
    CHUNKS,
    EMPTY,
    OFFSETS,
    STAGE,
    Dataset,
    datasets_of,
)
from megatron.apps.retro.database.merged import merge
from megatron.apps.retro.embedding.texts import chunk_texts
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.data.samples import Documents
from megatron.features.retro.project import dataset_identity
from megatron.util.processes import is_main_process

_CHUNKS_AT_ONCE = 4096
"""Whose text is in memory."""


def build_database(work: Preprocessing) -> None:
    """Writes the database of a project, or validates it. ValueError or OSError if the data cannot
    be used, or files differ."""
    datasets = datasets_of(work)
    validate = work.config.retro_task_validate
    _begin(work, datasets, validate is not None)
    dataset_of = {block.path: dataset for dataset in datasets for block in dataset.blocks}

    def make(block: FileBlock) -> Mapping[str, np.ndarray]:
        return chunks_of(work, dataset_of[block.path].documents, block)

    blocks = [block for dataset in datasets for block in dataset.blocks]
    run_blocks(blocks, make, STAGE, " documents", validate)
    if is_main_process():
        merge(work, datasets, compare=validate is not None)
    barrier()


def _begin(work: Preprocessing, datasets: Sequence[Dataset], validates: bool) -> None:
    """Sees that blocks and database of earlier runs are of these datasets. ConfigError if a
    finished database is not."""
    finished = work.project.datasets_file.exists()
    if finished:
        for dataset, info in zip(datasets, work.project.dataset_infos(), strict=False):
            work.project.check_unchanged(dataset.documents, info)
    barrier()  # nobody writes while all look
    if is_main_process() and not finished and not validates:
        for dataset in datasets:
            begin_blocks(dataset.folder, dataset_identity(dataset.documents))
    barrier()


def chunks_of(work: Preprocessing, documents: Documents, block: FileBlock) -> dict[str, np.ndarray]:
    """The chunks of a block of documents: pieces of the chunk length from the beginning of each,
    without an end-of-document token at its end."""
    length, eod = work.project.chunk_length, work.tokenizer.eod
    rows: list[tuple[int, int, int]] = []
    tokens: list[np.ndarray] = []
    measured = [np.zeros((0, 4), np.uint32)]

    def measure() -> None:
        lengths = work.embedder.lengths(chunk_texts(work.tokenizer, tokens))
        measured.append(np.column_stack([np.array(rows, np.int64), lengths]).astype(np.uint32))
        rows.clear()
        tokens.clear()

    for number in range(block.start, block.stop):
        document = documents.get(number)
        stop = len(document) - int(len(document) > 0 and document[-1] == eod)
        for start in range(0, stop, length):
            rows.append((number, start, min(start + length, stop)))
            tokens.append(document[start : start + length])
            if len(rows) == _CHUNKS_AT_ONCE:
                measure()
        block.advance(1)
    if rows:
        measure()
    return arrays_of(np.concatenate(measured), range(block.start, block.stop))


def arrays_of(
    chunks: npt.NDArray[np.uint32], documents: range
) -> dict[str, npt.NDArray[np.unsignedinteger]]:
    """The arrays of a file of the chunks, [n, 4], of some documents."""
    read = chunks[:, 3] > 0
    numbers = np.arange(documents.start, documents.stop)
    ends = np.searchsorted(chunks[read, 0], numbers, side="right")
    offsets = np.column_stack([numbers, ends]).astype(np.uint64)
    return {CHUNKS: chunks[read], EMPTY: chunks[~read], OFFSETS: offsets}
