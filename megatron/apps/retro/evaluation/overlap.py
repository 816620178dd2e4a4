"""How much of a chunk of text is in its neighbours, and what a model makes of chunks that have
little there: the evaluation of Borgeaud et al. 2022 (arXiv:2112.04426), section 2.6.

Shape suffixes: N chunks, M tokens of a chunk, K neighbours, R tokens of a neighbour with its
continuation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.training.metrics import perplexity


def longest_common(
    chunks_NM: npt.NDArray[np.int64], neighbors_NKR: npt.NDArray[np.int64], eod: int
) -> npt.NDArray[np.int64]:
    """Tokens of the longest run that a chunk has in common with one of its neighbours, [N], from 0
    to M. The end-of-document token, which short texts are padded with, is in none."""
    N, M = chunks_NM.shape
    longest_N = np.zeros(N, np.int64)
    # Of each token of the neighbours the length of the run that ends there and at the chunk's last
    # token so far.
    runs_NKR = np.zeros(neighbors_NKR.shape, np.int16)
    for place in range(M):
        token_N11 = chunks_NM[:, place, None, None]
        equal_NKR = (neighbors_NKR == token_N11) & (token_N11 != eod)
        before_NKR = np.zeros_like(runs_NKR)
        before_NKR[..., 1:] = runs_NKR[..., :-1]
        runs_NKR = np.where(equal_NKR, before_NKR + 1, 0).astype(np.int16)
        np.maximum(longest_N, runs_NKR.max((1, 2), initial=0), out=longest_N)
    return longest_N


@dataclass(frozen=True)
class ChunkScores:
    """What a model makes of the chunks of a text.

    Attributes:
        log_prob_N: of all tokens of each chunk, natural logarithm.
        tokens_N: that were predicted.
        bytes_N: of their text.
    """

    log_prob_N: npt.NDArray[np.float64]
    tokens_N: npt.NDArray[np.int64]
    bytes_N: npt.NDArray[np.int64]

    def part(self, chosen_N: npt.NDArray[np.bool_]) -> ChunkScores:
        return ChunkScores(
            self.log_prob_N[chosen_N], self.tokens_N[chosen_N], self.bytes_N[chosen_N]
        )

    @property
    def loss(self) -> float:
        """Nats per token; NaN without tokens."""
        tokens = int(self.tokens_N.sum())
        return -math.fsum(self.log_prob_N) / tokens if tokens else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text; NaN without text."""
        count = int(self.bytes_N.sum())
        return -math.fsum(self.log_prob_N) / math.log(2) / count if count else math.nan


@dataclass(frozen=True)
class ScoresByOverlap:
    """Numbers of the chunks that have a certain share in their neighbours, for several shares.

    Attributes:
        shares: the largest of each, ascending.
        chunks: how many there are.
        bits_per_byte: of each model on them, by its name; NaN without any.
        perplexity: the same.
    """

    shares: Sequence[float]
    chunks: Sequence[int]
    bits_per_byte: Mapping[str, Sequence[float]]
    perplexity: Mapping[str, Sequence[float]]


def filtered(
    overlap_N: npt.NDArray[np.float64], scores: Mapping[str, ChunkScores], shares: Sequence[float]
) -> ScoresByOverlap:
    """The measure of the paper: for each share a the chunks with r(C) <= a, where r(C) is the
    longest common run over the length of a chunk.

    Args:
        overlap_N: r(C) of each chunk; NaN for what is none, which is left out.
        scores: of several models, or of one with several kinds of neighbours, by name.
    """
    return _by_overlap([overlap_N <= share for share in shares], scores, shares)


def between(
    overlap_N: npt.NDArray[np.float64], scores: Mapping[str, ChunkScores], shares: Sequence[float]
) -> ScoresByOverlap:
    """The same for the chunks with shares up to each, and above the one before it."""
    above = (-math.inf, *shares[:-1])
    chosen = [
        (overlap_N > least) & (overlap_N <= most) for least, most in zip(above, shares, strict=True)
    ]
    return _by_overlap(chosen, scores, shares)


def _by_overlap(
    chosen: Sequence[npt.NDArray[np.bool_]],
    scores: Mapping[str, ChunkScores],
    shares: Sequence[float],
) -> ScoresByOverlap:
    parts = {name: [each.part(few) for few in chosen] for name, each in scores.items()}
    return ScoresByOverlap(
        shares,
        [int(few.sum()) for few in chosen],
        {name: [part.bits_per_byte for part in each] for name, each in parts.items()},
        {name: [part.perplexity for part in each] for name, each in parts.items()},
    )
