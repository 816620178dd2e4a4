"""Generation with retrieval: the neighbours of a text's chunks are fetched while the text grows.

Shape suffixes: N chunks of text, M tokens of a chunk, K neighbours of a chunk, R tokens of a
neighbour with its continuation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from megatron.apps.generation.execution.neighbor_memory import ending
from megatron.apps.generation.opening import OpenedRunner
from megatron.apps.generation.request import Runner, SequencePart, StepInput, StepOutput
from megatron.apps.retro.preprocessing import existing
from megatron.apps.retro.query import Retriever, check_model
from megatron.config import Setting
from megatron.data.samples import NeighborText
from megatron.families import family_of
from megatron.features.retro.chunks import ChunkDatabase
from megatron.features.retro.neighbors import NeighborSpec
from megatron.features.retro.samples import neighbor_texts

_REMEMBERED = 1 << 16
"""Number of chunks whose neighbours are cached."""
Search = Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.int64]]
"""Function with the interface of :meth:`megatron.apps.retro.query.Retriever.neighbors`."""


class ChunkNeighbors:
    """Cache of text chunks' neighbours, so that each chunk is searched for only once."""

    def __init__(self, search: Search, database: ChunkDatabase, spec: NeighborSpec) -> None:
        self._search, self.database, self.spec = search, database, spec
        self._known: OrderedDict[bytes, npt.NDArray[np.int64]] = OrderedDict()

    def numbers(self, chunks_NM: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the neighbours' database numbers, [N, K], nearest first, padded with -1."""
        keys = [chunk_M.tobytes() for chunk_M in chunks_NM]
        new = {key: n for n, key in enumerate(keys) if key not in self._known}
        if new:
            numbers_NK = self._search(chunks_NM[list(new.values())], self.spec.neighbors)
            self._known.update(zip(new, numbers_NK, strict=True))
        for key in keys:
            self._known.move_to_end(key)
        rows = [self._known[key] for key in keys]
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return np.array(rows, np.int64).reshape(-1, self.spec.neighbors)

    def tokens(self, chunks_NM: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the token ids of the neighbours that the model reads, [N, K, R]."""
        retrieved = self.spec.neighbor_length // self.spec.chunk_length
        return self.database.tokens(self.numbers(chunks_NM), retrieved)

    def of_text(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the neighbours' numbers for the complete chunks of a text, [N, K]."""
        length = self.spec.chunk_length
        whole = len(tokens) // length
        chunks_NM = np.array(tokens[: whole * length], np.int64).reshape(whole, length)
        return self.numbers(chunks_NM)


class RetrievingRunner:
    """Runner of a model that reads the neighbours of every chunk. They are searched for when the
    chunk's last token is computed. A page of the KV cache is one chunk. Only the main rank uses
    this class; see `megatron.apps.generation.request.Runner`."""

    def __init__(self, runner: Runner, neighbors: ChunkNeighbors) -> None:
        assert runner.page_size == neighbors.spec.chunk_length
        self._runner, self._neighbors = runner, neighbors
        self.page_size, self.pages = runner.page_size, runner.pages
        self.vocab_size = runner.vocab_size
        self.max_positions, self.max_prompt = runner.max_positions, runner.max_prompt
        self.start_token, self.long_after = runner.start_token, runner.long_after
        self.adapters, self.slots, self.piece = runner.adapters, runner.slots, runner.piece
        self.drafts = runner.drafts
        self._tokens_XM = np.zeros((runner.pages, runner.page_size), np.int64)

    def run(self, step: StepInput) -> StepOutput:
        for source, target in step.copies:
            self._tokens_XM[target] = self._tokens_XM[source]
        ended = [self._ended(part) for part in step.parts]
        pages = [page for each in ended for page in each]
        if not pages:
            return self._runner.run(step)
        tokens_NKR = self._neighbors.tokens(self._tokens_XM[pages])
        rows = iter(tokens_NKR.reshape(len(pages), -1).tolist())
        parts = tuple(
            replace(part, neighbors=tuple(tuple(next(rows)) for _ in each))
            for part, each in zip(step.parts, ended, strict=True)
        )
        return self._runner.run(replace(step, parts=parts))

    def close(self) -> None:
        self._runner.close()

    def _ended(self, part: SequencePart) -> list[int]:
        """Record the tokens of a part, and return the pages of the chunks that end in the part."""
        size, end = self.page_size, part.start + len(part.tokens)
        positions = np.arange(part.start, end)
        self._tokens_XM[np.array(part.pages)[positions // size], positions % size] = part.tokens
        return [part.pages[chunk] for chunk in ending(part, size)]


def neighbors_read(
    neighbors: ChunkNeighbors, detokenize: Callable[[list[int]], str], tokens: Sequence[int]
) -> list[NeighborText]:
    """Return the neighbours that a model has read for ``tokens``, a prompt with the generated text.
    The last token cannot complete a chunk, since nothing has been computed after it."""
    spec = neighbors.spec
    numbers_NK = neighbors.of_text(tokens[:-1])
    retrieved = spec.neighbor_length // spec.chunk_length
    return neighbor_texts(neighbors.database, numbers_NK, retrieved, detokenize)


def with_retrieval(
    opened: OpenedRunner, folder: str
) -> tuple[RetrievingRunner, Callable[[Sequence[int]], list[NeighborText]]]:
    """Return a runner, for the main rank, that fetches neighbours from a project's database, and a
    function that returns the neighbours read for a text, given its tokens. Raises ValueError or
    OSError if the project does not belong to the model, or if a stage is missing."""
    work = existing({"retro_project_dir": Setting(folder, "flag --retro-project-dir")})
    config = opened.run.config
    check_model(config.model, opened.tokenizer, work.project)
    spec = family_of(config.model.family).generation(config, opened.tokenizer).neighbors
    assert spec is not None, "see runner_of"
    retriever = Retriever(work.project, work.embedder, flags=work.config)
    _ = retriever.index  # report a missing stage before anything is generated
    neighbors = ChunkNeighbors(retriever.neighbors, retriever.database, spec)
    sources = partial(neighbors_read, neighbors, opened.tokenizer.detokenize)
    return RetrievingRunner(opened.runner, neighbors), sources
