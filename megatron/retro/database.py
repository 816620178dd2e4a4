"""The stage db-build: chunks of the training documents.

Upstream's files in ``db/``: for each dataset ``individual/NAME/START-END.hdf5`` with the chunks of
a block of documents; ``merged/train.hdf5`` with those of all, ``sampled.hdf5`` with the first of
each dataset, ``valid.hdf5`` with those of the documents that follow the training's.
``indexed_dataset_infos.json`` lists the datasets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError
from megatron.data.build import Portion
from megatron.data.kinds.retro.hdf5 import array_shapes, read_array, writing
from megatron.data.kinds.retro.project import dataset_identity, write_json
from megatron.families import family_of
from megatron.retro.blocks import FileBlock, barrier, blocks_of, run_blocks
from megatron.retro.index.strings import training_chunks
from megatron.retro.preprocessing import Preprocessing
from megatron.retro.texts import chunk_texts
from megatron.util.processes import is_main_process
from megatron.util.progress import say

VALID, INVALID, OFFSETS = "chunks_valid", "chunks_invalid", "doc_offsets"
"""Arrays of a block's file: the chunks, uint32 [n, 4] of document, start, end and the embedder's
length; those without any text for it; and for each document its number and the chunks up to its
end, uint64 [d, 2]."""
_TEXTS_AT_ONCE = 4096


@dataclass(frozen=True)
class Dataset:
    """A file of the training data and its documents: those for training are the first."""

    number: int
    name: str
    portion: Portion
    documents: range
    """The training documents, and what follows them in the file."""
    blocks: list[FileBlock]

    @property
    def trained(self) -> int:
        """The first document that is not for training."""
        return self.portion.units.stop


def build_database(work: Preprocessing) -> None:
    """Writes the database of a project, or validates it. ValueError or OSError if the data cannot
    be used, or files differ."""
    datasets = datasets_of(work)
    dataset_of = {block.path: dataset for dataset in datasets for block in dataset.blocks}

    def make(block: FileBlock) -> Mapping[str, np.ndarray]:
        return chunks_of(work, dataset_of[block.path].portion, block)

    blocks = [block for dataset in datasets for block in dataset.blocks]
    validate = work.config.retro_task_validate
    run_blocks(blocks, make, "db-build", " documents", validate)
    if is_main_process() and validate is None:
        _merge(work, datasets)
    barrier()


def datasets_of(work: Preprocessing) -> list[Dataset]:
    """The datasets of a project, in the order of its data."""
    run = work.run
    portions = family_of("gpt").data(run.config, run.tokenizer).training_portions()
    names: list[str] = []
    found = []
    for number, portion in enumerate(portions):
        name = Path(portion.path).name
        names.append(name)
        if names.count(name) > 1:
            name = f"{name}-{names.count(name)}"
        total = round(portion.source.share[1] * len(portion.documents))
        documents = range(portion.units.start, max(total, portion.units.stop))
        size = work.config.retro_doc_block_size
        folder = work.project.database_folder / "individual" / name
        blocks = [
            FileBlock(documents.start + b.start, documents.start + b.stop, b.path)
            for b in blocks_of(folder, len(documents), size)
        ]
        found.append(Dataset(number, name, portion, documents, blocks))
    return found


def chunks_of(work: Preprocessing, portion: Portion, block: FileBlock) -> dict[str, np.ndarray]:
    """The chunks of a block of documents: pieces of the chunk length from the beginning of each,
    without an end-of-document token at its end."""
    length, eod = work.project.chunk_length, work.tokenizer.eod
    documents = portion.documents
    rows: list[tuple[int, int, int]] = []
    tokens: list[np.ndarray] = []
    valid: list[npt.NDArray[np.uint32]] = []

    def measure() -> None:
        texts = chunk_texts(work.tokenizer, tokens)
        lengths = work.embedder.lengths(texts)
        valid.append(np.column_stack([np.array(rows, np.int64), lengths]).astype(np.uint32))
        rows.clear()
        tokens.clear()

    for number in range(block.start, block.stop):
        document = documents.get(number)
        stop = len(document) - int(len(document) > 0 and document[-1] == eod)
        for start in range(0, stop, length):
            rows.append((number, start, min(start + length, stop)))
            tokens.append(document[start : start + length])
            if len(rows) == _TEXTS_AT_ONCE:
                measure()
    if rows:
        measure()
    found = np.concatenate(valid) if valid else np.zeros((0, 4), np.uint32)
    read = found[:, 3] > 0
    numbers = np.arange(block.start, block.stop)
    ends = np.searchsorted(found[read, 0], numbers, side="right")
    return {
        VALID: found[read],
        INVALID: found[~read],
        OFFSETS: np.column_stack([numbers, ends]).astype(np.uint64),
    }


def _merge(work: Preprocessing, datasets: list[Dataset]) -> None:
    """Writes the merged files and the list of datasets."""
    infos = [_counts(dataset) for dataset in datasets]
    total = sum(info["n_chunks_train"] for info in infos)
    if not total:
        raise ConfigError(
            "the training documents have no chunk with text for the embedder: give other data, or "
            "another --bert-embedder-type"
        )
    if total >= 2**32 or any(d.documents.stop >= 2**32 for d in datasets):
        raise ConfigError(f"{total} chunks are more than the format's 2**32")
    wanted = training_chunks(work.config, total, work.embedder.width)
    for dataset, info in zip(datasets, infos, strict=True):
        share = int(wanted * dataset.portion.weight)
        info["n_chunks_sampled"] = min(max(share, 1), info["n_chunks_train"])
        if share > info["n_chunks_train"] and work.config.retro_index_ntrain is not None:
            say(
                f"db-build: {dataset.portion.path} has {info['n_chunks_train']:,} chunks, fewer "
                f"than its share of --retro-index-ntrain, {share:,}: all are used"
            )
    folder = work.project.database_folder / "merged"
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "train.hdf5", datasets, infos, "n_chunks_train", partial(_rows, True))
    _write(folder / "sampled.hdf5", datasets, infos, "n_chunks_sampled", partial(_rows, True))
    _write(folder / "valid.hdf5", datasets, infos, "n_chunks_valid", partial(_rows, False))
    write_json(work.project.datasets_file, infos)  # the last: with it the database is complete
    left_out = sum(info["n_chunks_invalid"] for info in infos)
    say(
        f"db-build: {total:,} chunks of {sum(info['n_docs_train'] for info in infos):,} documents "
        f"({left_out:,} without text are left out)"
    )


def _counts(dataset: Dataset) -> dict[str, Any]:
    """The entry of a dataset in the list, without the chunks that an index is trained on."""
    chunks = trained = invalid = 0
    for block in dataset.blocks:
        shapes = array_shapes(block.path)
        chunks += shapes[VALID][0]
        invalid += shapes[INVALID][0]
        trained += len(_rows(True, dataset, block)[0])
    return {
        "prefix": dataset.portion.path,
        "name": dataset.name,
        "ratio": dataset.portion.weight,
        "n_docs": len(dataset.portion.documents),
        "n_docs_train": len(dataset.portion.units),
        "n_chunks": chunks,
        "n_chunks_train": trained,
        "n_chunks_valid": chunks - trained,
        "n_chunks_invalid": invalid,
        **dataset_identity(dataset.portion.documents),
    }


Rows = Callable[[Dataset, FileBlock], tuple[np.ndarray, np.ndarray]]


def _rows(trained: bool, dataset: Dataset, block: FileBlock) -> tuple[np.ndarray, np.ndarray]:
    """The chunks of a block's documents that are for training, or are not, and the offsets of these
    documents."""
    chunks, offsets = read_array(block.path, VALID), read_array(block.path, OFFSETS)
    first = np.searchsorted(chunks[:, 0], dataset.trained)
    bound = np.searchsorted(offsets[:, 0], dataset.trained)
    part = slice(None, first) if trained else slice(first, None)
    return chunks[part], offsets[:bound] if trained else offsets[bound:]


def _write(
    path: Path, datasets: list[Dataset], infos: list[dict[str, Any]], count: str, rows: Rows
) -> None:
    """A merged file: its chunks, how many they are, and for training the documents' offsets."""
    total = sum(info[count] for info in infos)
    with writing(path) as file:
        chunks = file.create_dataset("chunks", (total, 5), np.uint32, track_times=False)
        documents = sum(info["n_docs_train"] for info in infos)
        offsets = None
        if count == "n_chunks_train":
            offsets = file.create_dataset(
                "doc_offsets", (documents, 3), np.uint64, track_times=False
            )
        written = listed = 0
        for dataset, info in zip(datasets, infos, strict=True):
            for part, ends in _limited(dataset, info[count], rows):
                if offsets is not None:
                    above = ends + np.array([0, written], np.uint64)
                    offsets[listed : listed + len(ends)] = _numbered(dataset, above)
                    listed += len(ends)
                chunks[written : written + len(part)] = _numbered(dataset, part)
                written += len(part)
        file.create_dataset("n_written", data=np.array([written], np.uint64), track_times=False)


def _limited(dataset: Dataset, count: int, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The first ``count`` chunks of a dataset, block by block."""
    for block in dataset.blocks:
        part, ends = rows(dataset, block)
        yield part[:count], ends
        count -= min(count, len(part))


def _numbered(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Rows with the number of their dataset in front."""
    return np.column_stack([np.full(len(rows), dataset.number, rows.dtype), rows])
