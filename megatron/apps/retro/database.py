"""The stage db-build: split the training documents into chunks, in upstream's files in ``db/``.

``individual/NAME/START-END.hdf5`` contains the chunks of a block of documents of one dataset. Three
files cover all datasets. ``merged/train.hdf5`` contains the chunks of the training documents; their
row numbers identify neighbours. ``merged/sampled.hdf5`` contains the first of these chunks of each
dataset, on which the index is trained. ``merged/valid.hdf5`` contains the chunks of the documents
after the training documents. ``indexed_dataset_infos.json`` lists the datasets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.apps.retro.blocks import (
    FileBlock,
    barrier,
    begin_blocks,
    blocks_of,
    differing,
    naming_full_disks,
    run_blocks,
)
from megatron.apps.retro.embedding import chunk_texts
from megatron.apps.retro.index.notation import training_chunks
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.config import ConfigError
from megatron.data.build import Portion
from megatron.data.indexed import IndexedDataset, best_dtype, idx_path
from megatron.data.samples import Documents
from megatron.data.sources import INDEXED
from megatron.families import family_of
from megatron.features.retro.hdf5 import array_shapes, read_array, writing
from megatron.features.retro.project import dataset_identity, write_json
from megatron.tokenizer.mark import mark_of
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

_STAGE = "db-build"
_CHUNKS, _EMPTY, _OFFSETS = "chunks_valid", "chunks_invalid", "doc_offsets"
"""Arrays of a block: its chunks, uint32 [n, 4] of document, start, end and length in the embedder's
tokens; the chunks without text for the embedder; and for each document its number and the count of
chunks up to its end, uint64 [d, 2]."""
_CHUNKS_AT_ONCE = 4096
"""Number of chunks whose text is in memory at a time."""
Info = dict[str, Any]
"""Entry of a dataset in the list of datasets."""


@dataclass(frozen=True)
class Dataset:
    """A file of the training data.

    Attributes:
        prefix: path prefix of the indexed files: those given by a flag, or the project's copy of
            data in another format.
        source: the data's name in the flag.
        weight: weight in the blend of the training data.
        trained: numbers of the training documents.
        blocks: blocks of the training documents and of the documents after them.
    """

    number: int
    name: str
    prefix: str
    source: str
    documents: Documents
    weight: float
    trained: range
    folder: Path
    blocks: list[FileBlock]


_MERGED = {"train": ("chunks", _OFFSETS), "sampled": ("chunks",), "valid": ("chunks",)}
"""Arrays of each merged file FILE. Each dataset's entry n_chunks_FILE is its number of chunks
there."""


def build_database(work: Preprocessing) -> None:
    """Write a project's database, or validate an existing one. Collective: every process must call
    it. Raises ValueError or OSError if the data cannot be used, or if files differ."""
    datasets = _datasets(work)
    validate = work.config.retro_task_validate
    _begin(work, datasets)
    documents = {block.path: each.documents for each in datasets for block in each.blocks}

    def make(block: FileBlock) -> Mapping[str, np.ndarray]:
        return _chunks(work, documents[block.path], block)

    blocks = [block for dataset in datasets for block in dataset.blocks]
    run_blocks(blocks, make, _STAGE, " documents", validate)
    if is_main_process():
        _merge(work, datasets, compare=validate is not None)
    barrier()


def _datasets(work: Preprocessing) -> list[Dataset]:
    """Return a project's datasets, in the order of its data. Data in other formats are tokenized
    and copied into the project as indexed files."""
    run, project = work.run, work.project
    datasets: list[Dataset] = []
    portions = family_of("gpt").data(run.config, run.tokenizer).training_portions()
    for number, portion in enumerate(portions):
        taken, plain = {each.name for each in datasets}, Path(portion.path).name
        numbered = (f"{plain}-{n}" for n in count(2))
        name = next(each for each in chain((plain,), numbered) if each not in taken)
        documents, prefix = portion.documents, portion.path
        if portion.source.kind != INDEXED:
            prefix = str(project.data_folder / name)
            documents = _copied(portion, prefix, work)
        stop = max(portion.units.stop, round(portion.source.share[1] * len(documents)))
        folder = project.database_folder / "individual" / name
        size = work.config.retro_doc_block_size
        blocks = blocks_of(folder, stop, size, portion.units.start)
        source = portion.documents.prefix
        weight, trained = portion.weight, portion.units
        datasets.append(
            Dataset(number, name, prefix, source, documents, weight, trained, folder, blocks)
        )
    return datasets


def _copied(portion: Portion, prefix: str, work: Preprocessing) -> IndexedDataset:
    """Return an indexed copy of data in another format, with one document per text. Raises
    ConfigError if an earlier copy has different text."""
    if is_main_process() and not idx_path(prefix).exists():
        tokenizer, documents = work.tokenizer, portion.documents
        mark = mark_of(tokenizer, work.run.config.tokenizer.tokenizer_type)
        numbers = progress_bar(f"tokenizing {portion.path}", range(len(documents)), unit=" texts")
        with (
            naming_full_disks(idx_path(prefix), _STAGE),
            IndexedDatasetWriter(
                prefix, best_dtype(tokenizer.vocab_size), None if mark is None else mark.json()
            ) as writer,
        ):
            for number in numbers:
                writer.add_document([documents.get(number)])
    barrier()
    copy = IndexedDataset(prefix)
    if dataset_identity(copy) != dataset_identity(portion.documents):
        raise ConfigError(
            f"{portion.path} has changed since {prefix} was copied from it: restore the file, or "
            "make another --retro-project-dir"
        )
    return copy


def _begin(work: Preprocessing, datasets: Sequence[Dataset]) -> None:
    """Check that blocks and database of earlier runs belong to these datasets. Outdated blocks are
    deleted. Raises ConfigError if a finished database does not match."""
    finished = work.project.datasets_file.exists()
    if finished:
        for dataset, info in zip(datasets, work.project.dataset_infos(), strict=False):
            work.project.check_unchanged(dataset.documents, info)
    barrier()  # no process may write while another still lists the files
    if is_main_process() and not finished and work.config.retro_task_validate is None:
        for dataset in datasets:
            begin_blocks(dataset.folder, dataset_identity(dataset.documents))
    barrier()


def _chunks(work: Preprocessing, documents: Documents, block: FileBlock) -> dict[str, np.ndarray]:
    """Return the arrays of a block of documents. Each document is divided into pieces of the chunk
    length, starting at its beginning. An end-of-document token at its end is left out."""
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
    chunks = np.concatenate(measured)
    read = chunks[:, 3] > 0
    numbers = np.arange(block.start, block.stop)
    ends = np.searchsorted(chunks[read, 0], numbers, side="right")
    offsets = np.column_stack([numbers, ends]).astype(np.uint64)
    return {_CHUNKS: chunks[read], _EMPTY: chunks[~read], _OFFSETS: offsets}


def _merge(work: Preprocessing, datasets: list[Dataset], compare: bool) -> None:
    """Write the merged files and the list of datasets, or with ``compare`` compare them bit for
    bit. Raises ValueError if they differ or if there are no chunks, and OSError if writing
    fails."""
    infos = [_counted(dataset, work) for dataset in datasets]
    total = sum(info["n_chunks_train"] for info in infos)
    if not total:
        raise ConfigError(
            "the training documents have no chunk with text for the embedder: give other data, or "
            "another --bert-embedder-type"
        )
    if (
        max(total, *(dataset.trained.stop for dataset in datasets)) >= 2**32
    ):  # the files store 32-bit numbers
        raise ConfigError(f"{total} chunks: chunks and documents must be fewer than 2**32")
    for info, sampled in zip(infos, _sampled(work, datasets, total), strict=True):
        info["n_chunks_sampled"] = min(sampled, info["n_chunks_train"])
    folder = work.project.database_folder / "merged"
    folder.mkdir(parents=True, exist_ok=True)
    for file in _MERGED:
        path = folder / f"{file}.hdf5"
        if compare:
            _compare(path, datasets, infos, file)
        else:
            with naming_full_disks(path, _STAGE):
                _write(path, datasets, infos, file)
    if compare:
        return
    with naming_full_disks(work.project.datasets_file, _STAGE):
        # written last, because it marks the database as complete
        write_json(work.project.datasets_file, infos)
    documents = sum(info["n_docs_train"] for info in infos)
    empty = sum(info["n_chunks_invalid"] for info in infos)
    say(f"{_STAGE}: {total:,} chunks of {documents:,} documents; {empty:,} without text left out")


def _sampled(work: Preprocessing, datasets: list[Dataset], total: int) -> list[int]:
    """Return the number of training chunks for the index from each dataset, in proportion to the
    dataset's weight. Without ``--retro-index-ntrain``, an existing database keeps its numbers."""
    if work.config.retro_index_ntrain is None and work.project.datasets_file.exists():
        return [info["n_chunks_sampled"] for info in work.project.dataset_infos()]
    learned = training_chunks(work.config, total, work.embedder.width)
    return [max(1, int(learned * dataset.weight)) for dataset in datasets]


def _counted(dataset: Dataset, work: Preprocessing) -> Info:
    """Return a dataset's list entry, except its count of sampled chunks."""
    chunks = trained = empty = 0
    for block in dataset.blocks:
        shapes = array_shapes(block.path)
        chunks += shapes[_CHUNKS][0]
        empty += shapes[_EMPTY][0]
        trained += len(_rows(dataset, block, True)[0])
    return {
        "prefix": work.project.data_word(dataset.prefix),
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
    """Return the chunks of a block's training documents, or of its other documents if ``trained``
    is False. Also return the offsets of the training documents."""
    chunks, offsets = read_array(block.path, _CHUNKS), read_array(block.path, _OFFSETS)
    stop = np.searchsorted(chunks[:, 0], dataset.trained.stop)
    last = np.searchsorted(offsets[:, 0], dataset.trained.stop)
    return chunks[:stop] if trained else chunks[stop:], offsets[:last]


def _merged_rows(
    datasets: list[Dataset], infos: list[Info], file: str
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the rows of a merged file block by block, with the dataset's number as the first
    column: chunks, uint32 [n, 5], and offsets, uint64 [d, 3]."""
    written = 0
    for dataset, info in zip(datasets, infos, strict=True):
        left = info[f"n_chunks_{file}"]
        for block in dataset.blocks:
            chunks, offsets = _rows(dataset, block, file != "valid")
            chunks = chunks[:left]
            offsets = offsets + np.array([0, written], np.uint64)
            yield {
                name: np.column_stack([np.full(len(rows), dataset.number, rows.dtype), rows])
                for name, rows in (("chunks", chunks), (_OFFSETS, offsets))
                if name in _MERGED[file]
            }
            left -= len(chunks)
            written += len(chunks)


def _write(path: Path, datasets: list[Dataset], infos: list[Info], file: str) -> None:
    total = sum(info[f"n_chunks_{file}"] for info in infos)
    layout: dict[str, Any] = {"chunks": (np.dtype("u4"), (total, 5))}
    layout["n_written"] = (np.dtype("u8"), (1,))
    if _OFFSETS in _MERGED[file]:
        documents = sum(info["n_docs_train"] for info in infos)
        layout[_OFFSETS] = (np.dtype("u8"), (documents, 3))
    with writing(path, layout) as files:
        for arrays in _merged_rows(datasets, infos, file):
            for name, rows in arrays.items():
                files[name].append(rows)
        files["n_written"].append(np.array([total]))


def _compare(path: Path, datasets: list[Dataset], infos: list[Info], file: str) -> None:
    """Compare a merged file with the blocks. Raises ValueError if they differ."""
    stored = {name: read_array(path, name) for name in _MERGED[file]}
    done = dict.fromkeys(stored, 0)
    for arrays in _merged_rows(datasets, infos, file):
        for name, rows in arrays.items():
            first, done[name] = done[name], done[name] + len(rows)
            if not np.array_equal(stored[name][first : done[name]], rows):
                raise differing(path, name)
    total = done["chunks"]
    if len(stored["chunks"]) != total or read_array(path, "n_written").tolist() != [total]:
        raise differing(path, "n_written")
