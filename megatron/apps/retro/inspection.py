"""Inspection of a project: print its database, samples and neighbours as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.preprocessing import project_run
from megatron.apps.retro.query import GPTSamples, gpt_samples
from megatron.config import ConfigError, FlagParser
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigResolver, build, option
from megatron.data.sources import PARTS
from megatron.features.retro.chunks import DATASET, DOCUMENT, START, STOP, ChunkDatabase
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.project import RetroProject
from megatron.features.retro.samples import RetroSample, RetroSamples, neighbor_texts
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer

_RETRIEVED = RetrievalConfig.retro_num_retrieved_chunks
"""Number of chunks of text to show for each neighbour, as many as a model reads by default."""


class RetroInspector:
    """Reader of a project for interactive Python, which needs no model. Methods have the names of
    Megatron-LM's ``tools.retro.cli``. ``part`` is ``train``, ``valid`` or ``test``; numbers start
    at 0. Raises ConfigError if a stage is missing, and IndexError if a number is out of range."""

    def init(self, folder: str | Path) -> None:
        """Open a project: a folder written by tools/retro/preprocess_data.py."""
        self.__dict__.clear()
        self._project = RetroProject(folder)

    @property
    def project(self) -> RetroProject:
        if "_project" not in self.__dict__:
            raise ConfigError("no project: call retro.init(FOLDER) first")
        return self._project

    @cached_property
    def database(self) -> ChunkDatabase:
        return self.project.database(self.tokenizer.eod)

    @cached_property
    def _run(self) -> Run:
        return project_run(self.project)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._run.tokenizer

    @cached_property
    def _parts(self) -> dict[str, GPTSamples]:
        return gpt_samples(self._run)

    def get_db_num_indexed_datasets(self) -> int:
        return len(self.database.sources)

    def get_db_indexed_dataset_infos(self) -> list[dict[str, Any]]:
        return self.project.dataset_infos()

    def get_db_num_chunks(self) -> int:
        return len(self.database)

    def get_db_chunk_gpt(self, chunk: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a chunk, int64 [m], padded with the end-of-document token."""
        return self.database.tokens(self._known(chunk))

    def get_db_chunk_text(self, chunk: int) -> str:
        return self.tokenizer.detokenize(self.get_db_chunk_gpt(chunk).tolist())

    def get_db_chunk_and_continuation_text(self, chunk: int) -> str:
        """Return the text of a chunk, followed by its continuation in the document."""
        tokens = self.database.tokens(self._known(chunk), _RETRIEVED)
        return self.tokenizer.detokenize(tokens.tolist())

    def get_db_chunk_place(self, chunk: int) -> tuple[str, int, int, int]:
        """Return the location of a chunk: dataset, document, first token, end token (exclusive)."""
        row = self.database.table[self._known(chunk)].tolist()
        return self.database.sources[row[DATASET]], row[DOCUMENT], row[START], row[STOP]

    def get_pt_num_samples(self, part: str) -> int:
        """Return the number of samples of a split that have neighbours."""
        return len(self.get_pt_dataset(part))

    def get_pt_num_chunks(self, part: str) -> int:
        return self.get_pt_num_samples(part) * self._chunks_per_sample

    def get_pt_num_samples_and_chunks(self, part: str) -> tuple[int, int]:
        return self.get_pt_num_samples(part), self.get_pt_num_chunks(part)

    def get_pt_dataset(self, part: str) -> RetroSamples:
        if part not in self._parts:
            raise ConfigError(
                f"{part} has no samples; those of {self.project.folder} are of "
                f"{', '.join(self._parts)}"
            )
        table, text = self.project.neighbors(part), self._parts[part].samples
        count = min(len(table), len(text))
        return RetroSamples(text, count, table, self.database, table.kept, _RETRIEVED, True)

    def get_pt_sample(self, part: str, sample: int) -> RetroSample:
        """Return a sample: its tokens [S + 1], and its neighbours' tokens [L, kept, 2 m]."""
        return self.get_pt_dataset(part)[sample]

    def get_neighbor_tokens(
        self, sample: int, chunk: int, part: str = "train"
    ) -> npt.NDArray[np.int64]:
        """Return the tokens of a chunk's neighbours, int64 [kept, 2 m]."""
        return self.get_pt_sample(part, sample).neighbors_LKR[self._within(chunk)]

    def print_neighbor_texts(self, sample: int, chunk: int, part: str = "train") -> None:
        """Print a chunk of a sample, followed by the text of its neighbours."""
        for line in self.described(sample, chunk, part):
            print(line)

    def described(
        self, sample: int, chunk: int, part: str = "train", most: int | None = None
    ) -> Iterator[str]:
        """Yield the lines that :meth:`print_neighbor_texts` prints, at most ``most`` neighbours."""
        samples, length = self.get_pt_dataset(part), self.project.chunk_length
        chunks_1K = samples.chunks(sample)[self._within(chunk)][None, :most]
        text = samples.text[sample][chunk * length : (chunk + 1) * length].tolist()
        yield f"{part} sample {sample}, chunk {chunk}:"
        yield from (f"    | {line}" for line in self.tokenizer.detokenize(text).splitlines())
        detokenize = self.tokenizer.detokenize
        for each in neighbor_texts(self.database, chunks_1K, _RETRIEVED, detokenize):
            source, document, start, stop = each.piece
            rank = each.name.partition(", ")[2]
            yield f"  {rank}: {source}: document {document}, tokens {start} to {stop - 1}"
            yield from (f"    | {line}" for line in each.text.splitlines())

    def summary(self) -> Iterator[str]:
        """Yield the lines of a summary of the project."""
        yield f"{self.project.config_file}:"
        for name, value in self.project.settings.items():
            yield f"    {name}: {json.dumps(value)}"
        counts = np.bincount(self.database.table[:, DATASET], minlength=len(self.database.sources))
        yield f"{self.get_db_num_chunks():,} chunks of {self.project.chunk_length} tokens"
        for source, count in zip(self.database.sources, counts.tolist(), strict=True):
            yield f"    {source}: {count:,} chunks"
        for part in self._parts:
            samples, chunks = self.get_pt_num_samples_and_chunks(part)
            yield f"{part}: {samples:,} samples, {chunks:,} chunks with neighbours"

    @property
    def _chunks_per_sample(self) -> int:
        return self.project.seq_length // self.project.chunk_length

    def _known(self, chunk: int) -> int:
        if not 0 <= chunk < len(self.database):
            raise IndexError(f"chunk {chunk} of a database of {len(self.database)}")
        return chunk

    def _within(self, chunk: int) -> int:
        if not 0 <= chunk < self._chunks_per_sample:
            raise IndexError(f"chunk {chunk} of a sample of {self._chunks_per_sample}")
        return chunk


@dataclass(frozen=True)
class InspectRetroConfig:
    """Project, and what to show of it."""

    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Project folder, written by tools/retro/preprocess_data.py."""
    part: str = option("train", choices=PARTS)
    """Split to show: training, validation or test samples."""
    sample: int | None = option(None, bounds=NOT_NEGATIVE)
    """Number of the sample to show, from 0. By default, a summary of the project is shown."""
    chunk: int | None = option(None, bounds=NOT_NEGATIVE, derived="all")
    """Number of the chunk within the sample, from 0."""
    neighbors: int = option(2, bounds=POSITIVE)
    """Number of neighbours to show for each chunk."""


def run_inspection(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Parse the command line and print the requested part of a project. Raises ValueError or
    OSError, naming the flag or stage, if there is nothing to print."""
    settings = FlagParser(InspectRetroConfig, description=description).settings(argv)
    ConfigResolver((InspectRetroConfig,), settings)
    config, inspector = build(InspectRetroConfig, settings), RetroInspector()
    if config.retro_project_dir is None:
        raise ConfigError("missing --retro-project-dir: the folder of the project")
    inspector.init(config.retro_project_dir)
    for line in _lines(config, inspector):
        print(line)


def _lines(config: InspectRetroConfig, inspector: RetroInspector) -> Iterator[str]:
    part, sample = config.part, config.sample
    if sample is None:
        yield from inspector.summary()
        return
    samples, chunks = inspector.get_pt_num_samples_and_chunks(part)
    in_sample = range(chunks // samples)
    if sample >= samples:
        raise ConfigError(f"--sample {sample}: {part} has the samples 0 to {samples - 1}")
    if config.chunk is not None and config.chunk not in in_sample:
        raise ConfigError(f"--chunk {config.chunk}: a sample has the chunks 0 to {in_sample[-1]}")
    for chunk in in_sample if config.chunk is None else [config.chunk]:
        yield from inspector.described(sample, chunk, part, config.neighbors)
