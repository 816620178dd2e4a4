"""Vectors without a model: words and pairs of words, hashed (Weinberger et al. 2009)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.embedding import readable
from megatron.apps.retro.embedding.config import EmbedderFlags
from megatron.config import Settings
from megatron.util.digests import hash64

_WORDS = re.compile(r"\w+|[^\w\s]")
_MOST_WORDS = 1 << 20
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: multiplying by it mixes the bits of a number."""
_HALF = np.uint64(32)


class HashingEmbedder:
    """Counts words and pairs of neighbouring words, without case, each in the column and with the
    sign that its hash says; a count n adds 1 + ln n. Vectors have the length 1, so that the
    smallest L2 distance is the largest cosine."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.identity: Mapping[str, Any] = {"type": "hashing", "width": width}
        self._hashes: dict[str, int] = {}

    def lengths(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """Words and punctuation marks of each text, [n]."""
        return np.array([len(_words(text)) for text in texts], np.int64)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """See :class:`~megatron.apps.retro.embedding.Embedder`."""
        words = [_words(text) for text in texts]
        lengths = [len(each) for each in words]
        hashes = np.fromiter(
            (self._hash(word) for each in words for word in each), np.uint64, sum(lengths)
        )
        rows = np.repeat(np.arange(len(texts)), lengths)
        within = rows[1:] == rows[:-1]
        pairs = _mixed(_mixed(hashes[:-1]) + hashes[1:])[within]
        features = np.concatenate([_mixed(hashes), pairs])
        return self._vectors(len(texts), np.concatenate([rows, rows[1:][within]]), features)

    def _vectors(
        self, count: int, rows: npt.NDArray[np.int64], features: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.float32]:
        order = np.lexsort((features, rows))
        rows, features = rows[order], features[order]
        first = np.ones(len(rows), bool)
        first[1:] = (rows[1:] != rows[:-1]) | (features[1:] != features[:-1])
        starts = np.flatnonzero(first)
        counts = np.diff(starts, append=len(rows))
        rows, features = rows[starts], features[starts]
        signs = np.where(features >> np.uint64(63), -1.0, 1.0)
        columns = (features % np.uint64(self.width)).astype(np.int64)
        vectors = np.bincount(
            rows * self.width + columns, signs * (1 + np.log(counts)), count * self.width
        ).reshape(count, self.width)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)

    def _hash(self, word: str) -> int:
        found = self._hashes.get(word)
        if found is None:
            if len(self._hashes) >= _MOST_WORDS:
                self._hashes.clear()
            found = self._hashes[word] = hash64(word.encode("utf-8", "surrogatepass"))
        return found


def build_hashing_embedder(config: EmbedderFlags, settings: Settings) -> HashingEmbedder:
    """The embedder of ``--retro-hashing-width``."""
    return HashingEmbedder(config.retro_hashing_width)


def _words(text: str) -> list[str]:
    return _WORDS.findall(readable(text).lower())


def _mixed(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers whose upper and lower bits depend on all of the given ones."""
    hashes = hashes * _ODD
    return (hashes ^ (hashes >> _HALF)) * _ODD
