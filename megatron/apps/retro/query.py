"""The stage query-neighbors: find the neighbours of all chunks of the GPT's samples, and write them
to files for training. Also the search for a database's chunks that are nearest to given chunks.

Shape suffixes: N chunks of samples, M tokens of a chunk, Q chunks searched for, K neighbours kept,
D documents of a sample.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.blocks import FileBlock, blocks_of, run_blocks
from megatron.apps.retro.config import IndexFlags
from megatron.apps.retro.embedding import Embedder, chunk_texts
from megatron.apps.retro.index import existing_files, open_index
from megatron.apps.retro.index.exact import VectorIndex
from megatron.apps.retro.preprocessing import Preprocessing
from megatron.config import ConfigError, ModelConfig
from megatron.data.index_cache import digest_of
from megatron.data.samples import SampleDataset
from megatron.data.sources import PARTS
from megatron.families import family_of
from megatron.features.retro.chunks import NEIGHBORS
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.project import GPT, RetroProject
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer
from megatron.training.plan import TrainingPlan
from megatron.util.digests import digest
from megatron.util.processes import is_main_process
from megatron.util.progress import say

_NEIGHBOR_DIRS = "retro_neighbor_dirs"
_CHUNKS_AT_ONCE = 4096
"""Number of chunks to embed and search for at a time, which bounds memory use."""
Documents = Collection[tuple[int, int]]
"""Set of documents, each as (dataset, document)."""


@dataclass(frozen=True)
class GPTSamples:
    """Samples of a split (``train``, ``valid`` or ``test``): the dataset that training reads, and
    the number of samples that training reads."""

    part: str
    samples: SampleDataset[Any]
    count: int


def gpt_samples(run: Run) -> dict[str, GPTSamples]:
    """Return the samples of each split that has any, in the order in which training reads them.
    Raises ValueError or OSError if the data cannot be used."""
    plan = TrainingPlan(run.config)
    data = family_of(run.config.model.family).data(run.config, run.tokenizer)
    counts = dict(zip(PARTS, plan.sample_counts, strict=True))
    datasets = data.datasets(plan.sample_counts, plan.batch_sizes)
    samples: dict[str, SampleDataset[Any] | None] = {"train": datasets.train}
    for part, named in (("valid", datasets.valid), ("test", datasets.test)):
        if len(named) > 1:
            raise ConfigError(
                f"{', '.join(named)}: only one set for {part} can have neighbours; name one, or "
                "blend them"
            )
        samples[part] = next(iter(named.values()), None)
    return {
        part: GPTSamples(part, dataset, counts[part])
        for part, dataset in samples.items()
        if dataset is not None and counts[part]
    }


@dataclass(frozen=True)
class SampleChunks:
    """Chunks of all samples of a split, numbered consecutively. ``numbers`` maps each dataset's
    path prefix to its number in the database."""

    part: GPTSamples
    chunks_per_sample: int
    chunk_length: int
    numbers: Mapping[str, int]

    def __len__(self) -> int:
        return self.part.count * self.chunks_per_sample

    def read(
        self, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], Sequence[frozenset[tuple[int, int]]]]:
        """Return the tokens of the chunks ``start`` to ``stop`` - 1, int64 [N, M], and for each
        chunk the documents of its sample that are in the database, as (dataset, document). Raises
        ValueError if a training sample contains text from a dataset that is not in the database."""
        tokens_NM = np.empty((stop - start, self.chunk_length), np.int64)
        documents: list[frozenset[tuple[int, int]]] = []
        while start < stop:
            sample, first = divmod(start, self.chunks_per_sample)
            last = min(self.chunks_per_sample, first + stop - start)
            tokens_T = self.part.samples[sample]
            within = tokens_T[first * self.chunk_length : last * self.chunk_length]
            filled = len(documents)
            tokens_NM[filled : filled + last - first] = within.reshape(-1, self.chunk_length)
            documents += [self._documents(sample)] * (last - first)
            start += last - first
        return tokens_NM, documents

    def _documents(self, sample: int) -> frozenset[tuple[int, int]]:
        pieces = self.part.samples.origin(sample)
        known = [piece for piece in pieces if piece.source in self.numbers]
        if self.part.part == "train" and len(known) < len(pieces):
            strange = next(piece.source for piece in pieces if piece.source not in self.numbers)
            raise ValueError(
                f"training sample {sample} is of {strange}, and the database of "
                f"{', '.join(self.numbers)}: its own text would be among its neighbours; run the "
                "stages from db-build on again, with another --retro-project-dir"
            )
        return frozenset((self.numbers[piece.source], piece.sequence) for piece in known)


class Retriever:
    """Search for the nearest chunks in a project's database. Each search finds ``searched`` chunks,
    and then removes those to be excluded. ``embedder`` must be the one that the index was made
    with. ``flags`` sets how thoroughly the index is searched."""

    def __init__(
        self,
        project: RetroProject,
        embedder: Embedder,
        searched: int = 200,
        flags: IndexFlags | None = None,
    ) -> None:
        self.project, self.embedder, self.searched = project, embedder, searched
        self.database = project.database()
        self._flags = flags or IndexFlags()

    @cached_property
    def index(self) -> VectorIndex:
        """Index of the project, opened on first use."""
        return open_index(self.project, self.embedder, self._flags)

    def neighbors(
        self,
        tokens_NM: npt.NDArray[np.int64],
        k: int,
        exclude: Sequence[Documents] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the ``k`` chunks nearest to each chunk, int64 [N, k], nearest
        first. Missing neighbours are -1. ``exclude`` contains, for each chunk, the documents whose
        chunks are left out."""
        texts = chunk_texts(self.project.tokenizer, tokens_NM)
        numbers_NQ, _ = self.index.search(self.embedder.embed(texts), max(self.searched, k))
        dropped_NQ = numbers_NQ < 0
        if exclude is not None:
            dropped_NQ |= self._of_documents(numbers_NQ, exclude)
        return first_kept(numbers_NQ, dropped_NQ, k)

    def _of_documents(
        self, numbers_NQ: npt.NDArray[np.int64], documents: Sequence[Documents]
    ) -> npt.NDArray[np.bool_]:
        """Return whether each found chunk is from a document of its row, bool [N, Q]."""
        most = max(map(len, documents), default=0)
        keys_ND = np.full((len(documents), most), -1, np.int64)
        for keys_D, row in zip(keys_ND, documents, strict=True):
            keys_D[: len(row)] = [dataset << 32 | document for dataset, document in row]
        pairs_NQ2 = self.database.documents(numbers_NQ)
        keys_NQ = pairs_NQ2[..., 0] << 32 | pairs_NQ2[..., 1]  # both numbers fit in 32 bits
        inside_NQ = np.zeros(numbers_NQ.shape, bool)
        for keys_N in keys_ND.T:
            inside_NQ |= keys_NQ == keys_N[:, None]
        return inside_NQ


def first_kept(
    numbers_NQ: npt.NDArray[np.int64], dropped_NQ: npt.NDArray[np.bool_], k: int
) -> npt.NDArray[np.int64]:
    """Return the first ``k`` <= Q numbers of each row that are not dropped, padded with -1."""
    order_NK = np.argsort(dropped_NQ, axis=1, kind="stable")[:, :k]
    kept = ~np.take_along_axis(dropped_NQ, order_NK, axis=1)
    return np.where(kept, np.take_along_axis(numbers_NQ, order_NK, axis=1), -1)


def query_neighbors(work: Preprocessing) -> None:
    """Write the neighbours of the training, validation and test samples, and record their folders
    in the project's configuration. Collective: every process must call it. Raises ValueError or
    OSError if an earlier stage is missing, or if a file cannot be read or written."""
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
        folders[part] = folder.name  # relative to the query folder, as upstream expects
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
        project.record({_NEIGHBOR_DIRS: folders})


def _check_search(project: RetroProject, part: str, folder: Path) -> None:
    """Raise ConfigError if the recorded neighbours of a split were found by another search."""
    recorded = (project.settings.get(_NEIGHBOR_DIRS) or {}).get(part)
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
    """Return the array of a block's file: the neighbours of the block's chunks, int64 [N, kept].
    Chunks of a sample's own documents are excluded."""
    neighbors_NK = np.empty((len(block), kept), np.int64)
    for start in range(block.start, block.stop, _CHUNKS_AT_ONCE):
        stop = min(start + _CHUNKS_AT_ONCE, block.stop)
        tokens_NM, documents = chunks.read(start, stop)
        neighbors_NK[start - block.start : stop - block.start] = retriever.neighbors(
            tokens_NM, kept, exclude=documents
        )
        block.advance(stop - start)
    return {NEIGHBORS: neighbors_NK}


def _description(
    work: Preprocessing, retriever: Retriever, part: str, count: int
) -> dict[str, Any]:
    """Return everything that the neighbours of a split depend on, for the name of their folder."""
    config, settings = work.config, work.project.settings
    index = existing_files(work.project.index_folder, config, "index-add").added
    return {
        "part": part,
        "chunks": count,
        "data": {key: value for key, value in settings.items() if key.startswith(GPT)},
        "database": digest_of(retriever.database.table),
        "embedder": dict(work.embedder.identity),
        "index": digest_of(np.memmap(index, np.uint8, "r")),
        "search": [config.retro_query_nprobe, config.retro_query_ef_search],
        "searched": config.retro_query_num_neighbors_query,
        "kept": config.retro_query_num_neighbors_save,
        "block": config.retro_block_size,
    }


def check_model(model: ModelConfig, tokenizer: Tokenizer, project: RetroProject) -> None:
    """Raise ConfigError if a model's tokenizer or chunk length differs from the project's. The
    project must have a database."""
    where, of_project = project.config_file, project.tokenizer
    if of_project.vocab_size != model.vocabulary.size:
        raise ConfigError(
            f"the model has a vocabulary of {model.vocabulary.size} tokens, and the tokenizer of "
            f"{where} has {of_project.vocab_size}: name the project of the model's training "
            "(--retro-project-dir)"
        )
    length = model.part(RetrievalConfig).retro_gpt_chunk_length
    if model.part(RetrievalConfig).retro_add_retriever and length != project.chunk_length:
        raise ConfigError(
            f"the model reads the neighbours of chunks of {length} tokens, and those of {where} "
            f"have {project.chunk_length} (retro_gpt_chunk_length): name the project of the "
            "model's training (--retro-project-dir)"
        )
    text = of_project.detokenize(project.database().tokens(np.zeros(1, np.int64), 1)[0].tolist())
    if tokenizer.tokenize(text) != of_project.tokenize(text):
        raise ConfigError(
            f"the tokenizer of {where} splits text otherwise than the model's: name the project of "
            "the model's training (--retro-project-dir)"
        )
