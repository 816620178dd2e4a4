"""Data of a RETRO run: samples with neighbours, batches, and the data pipeline.

Shape suffixes: B micro batch, S sequence, L chunks per sample, K neighbours per chunk, R tokens per
neighbour with its continuation, D documents per sample, 2 dataset and document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron.config import ConfigError
from megatron.data.build import Datasets
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import (
    NeighborText,
    Piece,
    RepeatedSamples,
    SampleDataset,
    SampleRecipe,
    SampleView,
    checked_index,
)
from megatron.data.sources import PARTS
from megatron.features.retro.chunks import (
    DATASET,
    DOCUMENT,
    START,
    STOP,
    ChunkDatabase,
    NeighborTable,
)
from megatron.features.retro.flags import RetrievalConfig, RetroDataConfig
from megatron.features.retro.project import RetroProject, project_counts, without_project


class RetroSample(NamedTuple):
    """Text sample with its neighbours' tokens, their chunk indices in the database (padded with -1;
    None without a database), and the documents of the text, if requested."""

    text: Any
    neighbors_LKR: npt.NDArray[np.int64]
    chunks_LK: npt.NDArray[np.int64] | None = None
    documents_D2: npt.NDArray[np.int64] | None = None


class RetroBatch(NamedTuple):
    """Batch of text with its neighbours.

    Attributes:
        neighbors_BLKR: tokens of each chunk's neighbours, int64. The end-of-document token pads
            missing neighbours and the text after the end of a document.
        documents_BD2: documents of each sample, int64: index of the dataset in the database (-1 if
            it is not there) and of the document in the dataset. Padded with -1. None without
            --retro-return-doc-ids.
    """

    text: Any
    neighbors_BLKR: Tensor
    documents_BD2: Tensor | None = None

    @classmethod
    def alone(cls, text: Any) -> RetroBatch:
        """Return a batch without neighbours to attend to, the paper's Retro[Off]."""
        return cls(text, torch.empty(text.tokens_BS.shape[0], 0, 0, 0, dtype=torch.int64))

    @property
    def tokens_BS(self) -> Tensor:
        tokens_BS: Tensor = self.text.tokens_BS
        return tokens_BS

    @property
    def loss_mask_BS(self) -> Tensor:
        loss_mask_BS: Tensor = self.text.loss_mask_BS
        return loss_mask_BS

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RetroBatch:
        documents = self.documents_BD2
        return RetroBatch(
            self.text.to(device, non_blocking),
            self.neighbors_BLKR.to(device, non_blocking=non_blocking),
            None if documents is None else documents.to(device, non_blocking=non_blocking),
        )

    def shortened(self, seq_length: int) -> RetroBatch:
        """Return the batch with only the first ``seq_length`` tokens of every sample, and the
        neighbours of their chunks. ``seq_length`` must be a multiple of the chunk length."""
        chunk_length = self.tokens_BS.shape[1] // self.neighbors_BLKR.shape[1]
        assert seq_length % chunk_length == 0, (seq_length, chunk_length)
        neighbors_BLKR = self.neighbors_BLKR[:, : seq_length // chunk_length].contiguous()
        return RetroBatch(self.text.shortened(seq_length), neighbors_BLKR, self.documents_BD2)


@dataclass(frozen=True)
class RetroCollator:
    """Collate function for samples with neighbours. ``collate`` is the one for their text."""

    collate: Callable[[Sequence[Any]], Any]

    def __call__(self, samples: Sequence[RetroSample]) -> RetroBatch:
        neighbors_BLKR = np.stack([sample.neighbors_LKR for sample in samples])
        documents = [sample.documents_D2 for sample in samples if sample.documents_D2 is not None]
        documents_BD2 = None
        if documents:
            rows = [torch.from_numpy(documents_D2) for documents_D2 in documents]
            documents_BD2 = pad_sequence(rows, batch_first=True, padding_value=-1)
        return RetroBatch(
            self.collate([sample.text for sample in samples]),
            torch.from_numpy(neighbors_BLKR),
            documents_BD2,
        )


@dataclass(frozen=True)
class RetroSamples:
    """First ``count`` samples of a text dataset, each with the ``neighbors`` (K) nearest neighbours
    of its chunks. Samples that ``table`` does not contain have none. ``retrieved`` chunks are read
    for each neighbour: the neighbour and its continuation. If ``identified``, samples include the
    indices of their documents.
    """

    text: SampleDataset[Any]
    count: int
    table: NeighborTable
    database: ChunkDatabase
    neighbors: int
    retrieved: int
    identified: bool = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> RetroSample:
        index = checked_index(index, len(self))
        chunks_LK = self.chunks(index)
        return RetroSample(
            self.text[index],
            self.database.tokens(chunks_LK, self.retrieved),
            chunks_LK,
            self._documents(index) if self.identified else None,
        )

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.text.origin(index)

    def chunks(self, index: int) -> npt.NDArray[np.int64]:
        """Return the database indices of the neighbours of a sample's chunks, [L, K], nearest first
        and padded with -1."""
        if index >= len(self.table):
            return np.full((self.table.chunks_per_sample, self.neighbors), -1, np.int64)
        return self.table.rows(index)[:, : self.neighbors]

    def _documents(self, index: int) -> npt.NDArray[np.int64]:
        number = self.database.numbers.get
        pieces = self.text.origin(index)
        documents = dict.fromkeys((number(piece.source, -1), piece.sequence) for piece in pieces)
        return np.array(list(documents), np.int64)


def neighbor_texts(
    database: ChunkDatabase,
    chunks_LK: npt.NDArray[np.int64],
    retrieved: int,
    detokenize: Callable[[list[int]], str],
) -> list[NeighborText]:
    """Return the neighbours of a sample's chunks, with their origin and readable text.
    ``chunks_LK`` has database indices. Each text has ``retrieved`` chunks, as a model reads it."""
    texts = []
    for (chunk, rank), number in np.ndenumerate(chunks_LK):
        if number < 0:
            continue
        row = database.table[number].tolist()
        piece = Piece(database.sources[row[DATASET]], row[DOCUMENT], row[START], row[STOP])
        text = detokenize(database.tokens(number, retrieved).tolist())
        texts.append(NeighborText(f"chunk {chunk + 1}, neighbour {rank + 1}", piece, text))
    return texts


@dataclass(frozen=True)
class MockRetroSamples:
    """Samples of ``--mock-data`` with artificial neighbours. As in the text, token ids count
    upwards (modulo the vocabulary size) from a random one, which depends only on the seed, split
    and index."""

    text: SampleDataset[Any]
    shape_LKR: tuple[int, int, int]
    vocab_size: int
    seed: int
    part: int

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int, /) -> RetroSample:
        rng = np.random.default_rng([self.seed, self.part, checked_index(index, len(self)), 1])
        chunks, neighbors, length = self.shape_LKR
        first_LK1 = rng.integers(self.vocab_size, size=(chunks, neighbors, 1))
        neighbors_LKR = (first_LK1 + np.arange(length)) % self.vocab_size
        return RetroSample(self.text[index], neighbors_LKR)

    def origin(self, index: int, /) -> Sequence[Piece]:
        return self.text.origin(index)


class RetroData(DataPipeline):
    """Data pipeline of a RETRO run: a GPT's pipeline, ``text``, with the neighbours of each chunk.
    Raises ConfigError if there is no project, or if another data kind moves the text of samples."""

    flags = frozenset({"retro"})

    def __init__(self, text: DataPipeline) -> None:
        config = text.config
        super().__init__(config, text.tokenizer)
        self.text = text
        moved = next(filter(None, (kind.moves_text for kind in config.kinds)), None)
        if moved is not None:
            raise ConfigError(
                f"{moved} moves the text of samples whose neighbours are known: leave it out, or "
                "train without --retro-add-retriever"
            )
        if self._flags.retro_project_dir is None and not config.data.mock_data:
            raise without_project()

    def recipe(self) -> SampleRecipe[Any]:
        return self.text.recipe()

    def collator(self) -> Callable[[Sequence[RetroSample]], RetroBatch]:
        return RetroCollator(self.text.collator())

    def mock(self, num_samples: int, part: int) -> SampleDataset[RetroSample]:
        retrieval = self.config.model.part(RetrievalConfig)
        chunks = self.seq_length // retrieval.retro_gpt_chunk_length
        shape_LKR = (chunks, retrieval.retro_num_neighbors, retrieval.retrieved_length)
        text = self.text.mock(num_samples, part)
        return MockRetroSamples(text, shape_LKR, self.tokenizer.vocab_size, self.seed, part)

    def view(self, sample: RetroSample, length: int) -> SampleView:
        """Implement `DataPipeline.view`. The result includes the neighbours of each chunk."""
        view = self.text.view(sample.text, length)
        if sample.chunks_LK is None:
            return view
        retrieval = self.config.model.part(RetrievalConfig)
        chunks_LK = sample.chunks_LK[: length // retrieval.retro_gpt_chunk_length]
        retrieved = retrieval.retro_num_retrieved_chunks
        texts = neighbor_texts(self._database, chunks_LK, retrieved, self.tokenizer.detokenize)
        return view._replace(neighbors=texts)

    @property
    def _flags(self) -> RetroDataConfig:
        return self.config.section(RetroDataConfig)

    @cached_property
    def project(self) -> RetroProject:
        assert self._flags.retro_project_dir is not None
        return RetroProject(
            self._flags.retro_project_dir, self.config.data.object_storage_cache_path
        )

    @cached_property
    def _database(self) -> ChunkDatabase:
        return self.project.database(self.tokenizer.eod)

    def _unordered(self, sample_counts: tuple[int, int, int]) -> Datasets:
        if self.config.data.mock_data:
            return super()._unordered(sample_counts)
        # The order of samples depends on their number, so it must be the number in the project.
        known = project_counts(self.project)
        texts = super()._unordered(known)
        needed = dict(zip(PARTS, zip(known, sample_counts, strict=True), strict=True))

        def with_neighbors(
            part: str, sets: Mapping[str, SampleDataset[Any]]
        ) -> dict[str, SampleDataset[RetroSample]]:
            return {
                name: self._with_neighbors(part, text, *needed[part])
                for name, text in sets.items()
                if needed[part][1]
            }

        train = {} if texts.train is None else {"train": texts.train}
        return Datasets(
            with_neighbors("train", train).get("train"),
            with_neighbors("valid", texts.valid),
            with_neighbors("test", texts.test),
        )

    def _with_neighbors(
        self, part: str, text: SampleDataset[Any], known: int, needed: int
    ) -> SampleDataset[RetroSample]:
        """Return at least ``needed`` samples of a split with their neighbours. A run with the
        project's config.json reads ``known`` samples. As in Megatron, the project may have
        neighbours for these or for all samples. Raises ConfigError if it has too few."""
        table, retrieval = self.project.neighbors(part), self.config.model.part(RetrievalConfig)
        where = f"--retro-project-dir {self.project.folder}"
        if table.kept < retrieval.retro_num_neighbors:
            raise ConfigError(
                f"--retro-num-neighbors {retrieval.retro_num_neighbors}: {where} has {table.kept} "
                "neighbours of each chunk; give fewer, or run query-neighbors again with a larger "
                "--retro-query-num-neighbors-save"
            )
        verified = self._flags.retro_verify_neighbor_count
        if verified and len(table) not in (known, len(text)):
            raise ConfigError(
                f"{where} has the neighbours of {len(table)} samples for {part}, and a run with "
                f"its config.json reads {known}: run query-neighbors again with the same "
                "--retro-gpt-train-samples, --retro-gpt-eval-interval, --retro-gpt-eval-iters and "
                "--retro-gpt-global-batch-size, or train with --retro-no-verify-neighbor-count"
            )
        count = len(table) if verified else len(text)
        if needed > count and verified and self._flags.dataloader_type != "cyclic":
            raise ConfigError(
                f"the run reads {needed} samples for {part}, of which {where} has {count}: leave "
                "out --rampup-batch-size, make another project with a larger "
                "--retro-gpt-train-samples, or read them several times with --dataloader-type "
                "cyclic"
            )
        samples = RetroSamples(
            text,
            count,
            table,
            self._database,
            retrieval.retro_num_neighbors,
            retrieval.retro_num_retrieved_chunks,
            self._flags.retro_return_doc_ids,
        )
        return RepeatedSamples(samples, needed) if needed > count else samples
