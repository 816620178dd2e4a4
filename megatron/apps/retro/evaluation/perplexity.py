"""The perplexity of a Retro with and without its neighbours, chunk by chunk, on any layout.

Shape suffixes: B micro batch, S sequence, L chunks of a sample, M tokens of a chunk, K neighbours,
Q neighbours that files have, N chunks of all samples, I samples; P the L chunks of a sample and its
last token, which begins another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from megatron.apps.retro.evaluation.overlap import ChunkScores, longest_common
from megatron.data.samples import SampleDataset
from megatron.engine.train_engine import ModelEngine
from megatron.features.retro.batch import (
    RetroBatch,
    RetroCollator,
    RetroSample,
)
from megatron.features.retro.chunks import ChunkDatabase
from megatron.features.retro.flags import RetrievalConfig
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.training.measuring import measure_samples

Neighbors = Literal["own", "none", "shuffled"]
"""What a model reads beside each chunk: its neighbours; nothing, without attending to any; or those
of another chunk."""
NEIGHBORS: tuple[Neighbors, ...] = get_args(Neighbors)

_CHUNKS_AT_ONCE = 1024
"""Compared with their neighbours together."""


@dataclass(frozen=True)
class EvaluatedText:
    """Samples whose chunks have neighbours.

    Attributes:
        samples: of the GPT; each has S + 1 tokens.
        numbers_ILQ: of the neighbours of every chunk of the samples in the database, nearest first;
            -1 where there are fewer.
    """

    samples: SampleDataset[Any]
    numbers_ILQ: npt.NDArray[np.int64]
    database: ChunkDatabase

    def __len__(self) -> int:
        return len(self.numbers_ILQ)

    @property
    def chunk_length(self) -> int:
        return self.database.chunk_length

    def shuffled(self, seed: int) -> EvaluatedText:
        """The same samples, whose chunks have the neighbours of others."""
        numbers_NQ = self.numbers_ILQ.reshape(-1, self.numbers_ILQ.shape[-1])
        # Nothing stays where it is: in a random order each takes those of the one after it.
        order_N = np.random.default_rng(seed).permutation(len(numbers_NQ))
        changed_NQ = np.empty_like(numbers_NQ)
        changed_NQ[order_N] = numbers_NQ[np.roll(order_N, -1)]
        return EvaluatedText(
            self.samples, changed_NQ.reshape(self.numbers_ILQ.shape), self.database
        )

    def tokens(self, sample: int) -> npt.NDArray[np.int64]:
        """Of a sample, [S + 1]."""
        return np.asarray(self.samples[sample], np.int64)

    @property
    def datasets_I(self) -> npt.NDArray[np.str_]:
        """The dataset that each sample is from, as a flag named it."""
        origins = (self.samples.origin(sample) for sample in range(len(self)))
        return np.array([next(iter(pieces)).source for pieces in origins])

    def counts(self, count: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]) -> Any:
        """Sums over the predicted tokens of every sample of what a function gives for each token,
        int64 [I, P]."""
        length, found = self.chunk_length, []
        for sample in range(len(self)):
            values_T = count(self.tokens(sample))
            values_T[0] = 0  # nothing is before it
            values_T = np.pad(values_T, (0, length - 1))
            found.append(values_T.reshape(-1, length).sum(1))
        return np.array(found, np.int64)


@dataclass(frozen=True)
class _ReadSamples:
    """Samples as a model reads them."""

    text: EvaluatedText
    neighbors: int
    retrieved: int

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> RetroSample:
        numbers_LK = self.text.numbers_ILQ[index, :, : self.neighbors]
        tokens_LKR = self.text.database.tokens(numbers_LK, self.retrieved)
        return RetroSample(self.text.samples[index], tokens_LKR)


@dataclass(frozen=True)
class _TextAlone:
    """The same without neighbours."""

    text: EvaluatedText

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> Any:
        return self.text.samples[index]


def _of_chunks(state: LayerState, batch: Any, length: int) -> dict[str, Tensor]:
    assert state.scores is not None
    # The first token of a sample is in its first chunk, and is not predicted.
    padded = F.pad(state.scores.log_probs_BP.double(), (1, length - 1))
    return {"log_prob": padded.unflatten(1, (-1, length)).sum(2)}


def chunk_log_probs(length: int) -> Measure:
    """The log-probability of the tokens of every chunk of a sample, [B, P]. The tokens that read
    the neighbours of a chunk, from its last one on, predict those of the chunk after it."""
    take = partial(_of_chunks, length=length)
    return Measure(("log_prob",), take, ends="scores", per_sample=True)


def measure_chunks(
    engine: ModelEngine,
    collate: Callable[[Sequence[Any]], Any],
    text: EvaluatedText,
    neighbors: Neighbors,
    micro_batch_size: int,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> npt.NDArray[np.float64]:
    """The log-probability of the tokens of every chunk, [I, P]. Every rank must call it.

    Args:
        engine: of a Retro, or with ``none`` of a GPT.
        collate: makes a GPT's batch of its samples.
        seed: of the order of what is shuffled.
    """
    model = engine.config.model
    retrieval = model.part(RetrievalConfig)
    if neighbors == "shuffled":
        text = text.shuffled(seed)
    dataset = _ReadSamples(
        text, retrieval.retro_num_neighbors, retrieval.retro_num_retrieved_chunks
    )
    of_batch: Callable[[Sequence[Any]], Any] = RetroCollator(collate)
    samples: Any = dataset
    if neighbors == "none":
        samples = _TextAlone(text)
        of_batch = collate
        if retrieval.retro_add_retriever:
            of_batch = partial(_without, collate)
    measure = chunk_log_probs(text.chunk_length)
    found = measure_samples(engine, samples, of_batch, measure, micro_batch_size, progress=progress)
    return found["log_prob"]


def _without(collate: Callable[[Sequence[Any]], Any], samples: Sequence[Any]) -> RetroBatch:
    return RetroBatch.alone(collate(samples))


def scores_of(
    text: EvaluatedText, log_prob_IP: npt.NDArray[np.float64], bytes_V: npt.NDArray[np.int64]
) -> ChunkScores:
    """The scores of every chunk, and of the last token of every sample, N = I x P. ``bytes_V`` are
    the bytes of each token of the vocabulary."""
    tokens_IP = text.counts(np.ones_like)
    bytes_IP = text.counts(lambda tokens_T: bytes_V[tokens_T])
    return ChunkScores(log_prob_IP.ravel(), tokens_IP.ravel(), bytes_IP.ravel())


def overlaps(text: EvaluatedText, compared: int, retrieved: int) -> npt.NDArray[np.float64]:
    """r(C) of every chunk, [I, P]: the longest run in common with the nearest ``compared``
    neighbours, of ``retrieved`` chunks of text each, over the length of a chunk. The last tokens of
    samples, which are no chunks, have NaN: no share is as large."""
    length, (samples, chunks, _) = text.chunk_length, text.numbers_ILQ.shape
    found_IP = np.full((samples, chunks + 1), np.nan)
    per_step = max(1, _CHUNKS_AT_ONCE // chunks)
    for start in range(0, samples, per_step):
        several = range(start, min(start + per_step, samples))
        chunks_NM = np.concatenate(
            [text.tokens(each)[: chunks * length].reshape(chunks, length) for each in several]
        )
        numbers_NK = text.numbers_ILQ[several, :, :compared].reshape(len(chunks_NM), -1)
        neighbors_NKR = text.database.tokens(numbers_NK, retrieved)
        longest_N = longest_common(chunks_NM, neighbors_NKR, text.database.eod)
        found_IP[several, :chunks] = longest_N.reshape(-1, chunks) / length
    return found_IP
