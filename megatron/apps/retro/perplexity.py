"""Perplexity of a Retro with and without its neighbours, chunk by chunk, on any layout, and the
overlap of chunks with their neighbours. This is the evaluation of Borgeaud et al. 2022
(arXiv:2112.04426), section 2.6.

Shape suffixes: B micro batch, S sequence, L chunks of a sample, M tokens of a chunk, K neighbours,
Q neighbours stored in the files, R tokens of a neighbour with its continuation, N chunks of all
samples, I samples, P = L + 1: the chunks of a sample and its last token, which begins another
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from megatron.data.samples import SampleDataset
from megatron.engine.train_engine import ModelEngine
from megatron.features.evaluation.checkpoints import MadeSamples, measure_samples
from megatron.features.evaluation.scoring import SCORES, token_scores
from megatron.features.retro.chunks import ChunkDatabase
from megatron.features.retro.flags import RetrievalConfig
from megatron.features.retro.samples import RetroBatch, RetroCollator, RetroSample
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.training.metrics import perplexity

Neighbors = Literal["own", "none", "shuffled"]
"""Neighbours that a model reads for each chunk: the chunk's own, none (without retrieval), or those
of another chunk."""
NEIGHBORS: tuple[Neighbors, ...] = get_args(Neighbors)
_CHUNKS_AT_ONCE = 1024
"""Number of chunks to compare with their neighbours at a time."""


@dataclass(frozen=True)
class EvaluatedText:
    """Samples of a GPT, S + 1 tokens each, and their chunks' neighbours as numbers in the database,
    nearest first. Missing neighbours are -1."""

    samples: SampleDataset[Any]
    numbers_ILQ: npt.NDArray[np.int64]
    database: ChunkDatabase

    def __len__(self) -> int:
        return len(self.numbers_ILQ)

    @property
    def chunk_length(self) -> int:
        return self.database.chunk_length

    def shuffled(self, seed: int) -> EvaluatedText:
        """Return the same samples with the neighbours exchanged between chunks, so that no chunk
        keeps its own."""
        numbers_NQ = self.numbers_ILQ.reshape(-1, self.numbers_ILQ.shape[-1])
        # Derange the neighbours: in random order, each chunk gets those of the next.
        order_N = np.random.default_rng(seed).permutation(len(numbers_NQ))
        changed_NQ = np.empty_like(numbers_NQ)
        changed_NQ[order_N] = numbers_NQ[np.roll(order_N, -1)]
        return EvaluatedText(
            self.samples, changed_NQ.reshape(self.numbers_ILQ.shape), self.database
        )

    def tokens(self, sample: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a sample, [S + 1]."""
        return np.asarray(self.samples[sample], np.int64)

    @property
    def datasets_I(self) -> npt.NDArray[np.str_]:
        """Dataset of each sample, by its name in the flag."""
        origins = (self.samples.origin(sample) for sample in range(len(self)))
        return np.array([next(iter(pieces)).source for pieces in origins])

    def counts(
        self, count: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> npt.NDArray[np.int64]:
        """Return, for each chunk, the sum over its predicted tokens of the values that ``count``
        returns for each token, [I, P]."""
        length, sums = self.chunk_length, []
        for sample in range(len(self)):
            values_T = count(self.tokens(sample))
            values_T[0] = 0  # the first token is not predicted
            values_T = np.pad(values_T, (0, length - 1))
            sums.append(values_T.reshape(-1, length).sum(1))
        return np.array(sums, np.int64)


def chunk_log_probs(length: int) -> Measure:
    """Return a measure of the log-probability of each chunk's tokens, [B, P]. The positions that
    read a chunk's neighbours, starting with the chunk's last token, predict the tokens of the next
    chunk."""

    def take(state: LayerState, batch: Any) -> dict[str, Tensor]:
        # The first token of a sample belongs to its first chunk, but is not predicted.
        padded = F.pad(token_scores(state).log_probs_BP.double(), (1, length - 1))
        return {"log_prob": padded.unflatten(1, (-1, length)).sum(2)}

    return Measure(("log_prob",), take, objective=SCORES, per_sample=True)


def measure_chunks(
    engine: ModelEngine,
    collate: Callable[[Sequence[Any]], Any],
    text: EvaluatedText,
    neighbors: Neighbors,
    micro_batch_size: int,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> npt.NDArray[np.float64]:
    """Return the log-probability of each chunk's tokens, [I, P]. Collective: every rank must call
    it.

    Args:
        engine: engine of a Retro, or of a GPT if ``neighbors`` is "none".
        collate: function that makes a GPT batch from samples.
        seed: seed for shuffling the neighbours.
    """
    retrieval = engine.config.model.part(RetrievalConfig)
    if neighbors == "shuffled":
        text = text.shuffled(seed)

    def with_neighbors(sample: int) -> RetroSample:
        numbers_LK = text.numbers_ILQ[sample, :, : retrieval.retro_num_neighbors]
        tokens_LKR = text.database.tokens(numbers_LK, retrieval.retro_num_retrieved_chunks)
        return RetroSample(text.samples[sample], tokens_LKR)

    def without_neighbors(samples: Sequence[Any]) -> RetroBatch:
        return RetroBatch.alone(collate(samples))

    make: Callable[[int], Any] = with_neighbors
    of_batch: Callable[[Sequence[Any]], Any] = RetroCollator(collate)
    if neighbors == "none":
        make = text.samples.__getitem__
        of_batch = without_neighbors if retrieval.retro_add_retriever else collate
    rows = measure_samples(
        engine,
        MadeSamples(range(len(text)), make),
        of_batch,
        chunk_log_probs(text.chunk_length),
        micro_batch_size,
        progress=progress,
    )
    return rows["log_prob"]


def overlaps(text: EvaluatedText, compared: int, retrieved: int) -> npt.NDArray[np.float64]:
    """Return the overlap r(C) of each chunk, [I, P]: the length of the longest run of tokens that
    it shares with one of its ``compared`` nearest neighbours, divided by the chunk length.
    ``retrieved`` chunks of text are used of each neighbour. The last token of a sample is not a
    chunk; its overlap is NaN."""
    length, (samples, chunks, _) = text.chunk_length, text.numbers_ILQ.shape
    shares_IP = np.full((samples, chunks + 1), np.nan)
    per_step = max(1, _CHUNKS_AT_ONCE // chunks)
    for start in range(0, samples, per_step):
        several = range(start, min(start + per_step, samples))
        chunks_NM = np.concatenate(
            [text.tokens(each)[: chunks * length].reshape(chunks, length) for each in several]
        )
        numbers_NK = text.numbers_ILQ[several, :, :compared].reshape(len(chunks_NM), -1)
        neighbors_NKR = text.database.tokens(numbers_NK, retrieved)
        longest_N = longest_common(chunks_NM, neighbors_NKR, text.database.eod)
        shares_IP[several, :chunks] = longest_N.reshape(-1, chunks) / length
    return shares_IP


def longest_common(
    chunks_NM: npt.NDArray[np.int64], neighbors_NKR: npt.NDArray[np.int64], eod: int
) -> npt.NDArray[np.int64]:
    """Return the length of the longest run of tokens that a chunk shares with any of its
    neighbours, [N], from 0 to M. The end-of-document token, which is used as padding, never
    counts."""
    longest_N = np.zeros(len(chunks_NM), np.int64)
    # For each token of the neighbours, the length of the shared run that ends at it and at the
    # current token of the chunk.
    runs_NKR = np.zeros(neighbors_NKR.shape, np.int16)
    for token_N in chunks_NM.T:
        token_N11 = token_N[:, None, None]
        equal_NKR = (neighbors_NKR == token_N11) & (token_N11 != eod)
        before_NKR = np.zeros_like(runs_NKR)
        before_NKR[..., 1:] = runs_NKR[..., :-1]
        runs_NKR = np.where(equal_NKR, before_NKR + 1, 0).astype(np.int16)
        np.maximum(longest_N, runs_NKR.max((1, 2), initial=0), out=longest_N)
    return longest_N


@dataclass(frozen=True)
class ChunkScores:
    """Log-probability of each chunk's tokens, number of predicted tokens, and bytes of text."""

    log_prob_N: npt.NDArray[np.float64]
    tokens_N: npt.NDArray[np.int64]
    bytes_N: npt.NDArray[np.int64]

    def part(self, chosen_N: npt.NDArray[np.bool_]) -> ChunkScores:
        return ChunkScores(
            self.log_prob_N[chosen_N], self.tokens_N[chosen_N], self.bytes_N[chosen_N]
        )

    @property
    def loss(self) -> float:
        """Loss in nats per token. NaN if there are no tokens."""
        tokens = int(self.tokens_N.sum())
        return -math.fsum(self.log_prob_N) / tokens if tokens else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text. NaN if there is no text."""
        count = int(self.bytes_N.sum())
        return -math.fsum(self.log_prob_N) / math.log(2) / count if count else math.nan


def scores_of(
    text: EvaluatedText, log_prob_IP: npt.NDArray[np.float64], bytes_V: npt.NDArray[np.int64]
) -> ChunkScores:
    """Return the scores of every chunk, and of the last token of every sample, N = I x P.
    ``bytes_V`` contains the number of text bytes of each token of the vocabulary."""
    tokens_IP = text.counts(np.ones_like)
    bytes_IP = text.counts(lambda tokens_T: bytes_V[tokens_T])
    return ChunkScores(log_prob_IP.ravel(), tokens_IP.ravel(), bytes_IP.ravel())


def scores_by_dataset(text: EvaluatedText, scores: ChunkScores) -> dict[str, ChunkScores]:
    """Return the scores of each dataset's samples, for a blend of datasets."""
    datasets_N = np.repeat(text.datasets_I, len(scores.tokens_N) // len(text))
    return {str(name): scores.part(datasets_N == name) for name in np.unique(datasets_N)}


def filtered(
    overlap_N: npt.NDArray[np.float64], shares: Sequence[float]
) -> list[npt.NDArray[np.bool_]]:
    """Return masks of the chunks that the paper measures: for each share a, chunks with r(C) <= a.
    Chunks without r(C) (NaN) are left out."""
    return [overlap_N <= share for share in shares]


def between(
    overlap_N: npt.NDArray[np.float64], shares: Sequence[float]
) -> list[npt.NDArray[np.bool_]]:
    """Return a mask for each share: chunks whose overlap is at most this share and above the
    previous one."""
    above = (-math.inf, *shares[:-1])
    return [
        (overlap_N > least) & (overlap_N <= most) for least, most in zip(above, shares, strict=True)
    ]
