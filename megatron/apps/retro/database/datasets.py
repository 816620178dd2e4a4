"""The datasets of a project: the files of its training data, and their blocks of documents."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from megatron.apps.retro.blocks import (
    FileBlock,
    barrier,
    blocks_of,
    naming_full_disks,
)
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.config import ConfigError
from megatron.data.build import Portion
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.indexed.dataset import best_dtype, idx_path
from megatron.data.samples import Documents
from megatron.data.sources import INDEXED
from megatron.families import family_of
from megatron.features.retro.project import dataset_identity
from megatron.tokenizer.mark import mark_of
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar

STAGE = "db-build"
CHUNKS, EMPTY, OFFSETS = "chunks_valid", "chunks_invalid", "doc_offsets"
"""Arrays of a block: its chunks, uint32 [n, 4] of document, start, end and the embedder's length;
those without text for the embedder; and of each document its number and the chunks up to its end,
uint64 [d, 2]."""


@dataclass(frozen=True)
class Dataset:
    """A file of the training data."""

    number: int
    name: str
    prefix: str
    """Of the indexed files: those that a flag named, or the project's copy of other ones."""
    source: str
    """What the flag named."""
    documents: Documents
    weight: float
    """In the blend of the training data."""
    trained: range
    """Numbers of the training documents."""
    folder: Path
    """Of the blocks."""
    blocks: list[FileBlock]
    """Of these, and of those that follow them."""


def datasets_of(work: Preprocessing) -> list[Dataset]:
    """The datasets of a project, in the order of its data. Data that are not indexed files are
    copied into the project, tokenized."""
    run, project = work.run, work.project
    found: list[Dataset] = []
    for number, portion in enumerate(
        family_of("gpt").data(run.config, run.tokenizer).training_portions()
    ):
        name = _free_name(Path(portion.path).name, {each.name for each in found})
        documents, prefix = portion.documents, portion.path
        if portion.source.kind != INDEXED:
            prefix = str(project.data_folder / name)
            mark = mark_of(run.tokenizer, run.config.tokenizer.tokenizer_type)
            made = None if mark is None else mark.json()
            documents = _copied(portion, prefix, run.tokenizer.vocab_size, made)
        stop = max(portion.units.stop, round(portion.source.share[1] * len(documents)))
        folder = project.database_folder / "individual" / name
        size = work.config.retro_doc_block_size
        blocks = blocks_of(folder, stop, size, portion.units.start)
        found.append(
            Dataset(
                number,
                name,
                prefix,
                source=portion.documents.prefix,
                documents=documents,
                weight=portion.weight,
                trained=portion.units,
                folder=folder,
                blocks=blocks,
            )
        )
    return found


def _free_name(name: str, taken: Collection[str]) -> str:
    """A name, with a number behind it if another dataset has it."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(each for each in chain((name,), numbered) if each not in taken)


def _copied(portion: Portion, prefix: str, vocab_size: int, mark: bytes | None) -> IndexedDataset:
    """An indexed copy of other data, sequence by sequence. ConfigError if an earlier copy is of
    other text."""
    if is_main_process() and not idx_path(prefix).exists():
        documents = portion.documents
        numbers = progress_bar(f"tokenizing {portion.path}", range(len(documents)), unit=" texts")
        with (
            naming_full_disks(idx_path(prefix), STAGE),
            IndexedDatasetWriter(prefix, best_dtype(vocab_size), mark) as writer,
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
