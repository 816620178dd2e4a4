"""Texts as sets of shingles, their MinHash signatures, and their similarity.

Shape suffixes: D documents, S seeds (values of a signature), H shingles of all documents together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

CHARACTERS = 5
"""Length of a shingle, as in Megatron's scripts."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, made odd
_MIXER = np.uint64(0xD6E8FEB86659FD93)


def shingle_hashes(text: str) -> npt.NDArray[np.uint64]:
    """A hash of 64 bits for each run of 5 characters, in order, repeated ones included.

    A text of fewer characters is one shingle; the empty text has none.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    width = min(CHARACTERS, len(codes))
    hashes = np.zeros(len(codes) - width + 1 if width else 0, np.uint64)
    for offset in range(width):
        hashes = hashes * _MULTIPLIER + codes[offset : offset + len(hashes)] + np.uint64(1)
    # A polynomial alone maps similar shingles to similar numbers.
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIXER
    hashes ^= hashes >> np.uint64(32)
    return hashes


def signatures_DS(texts: Sequence[str], seeds: int, seed: int) -> npt.NDArray[np.uint32]:
    """MinHash signatures: two texts agree in a value with the probability of their Jaccard.

    Args:
        seeds: values of a signature.
        seed: of the hash functions.
    """
    if not texts:
        return np.empty((0, seeds), np.uint32)
    hashes = [shingle_hashes(text) for text in texts]
    offsets = np.zeros(len(texts) + 1, np.uint64)
    np.cumsum([len(h) for h in hashes], out=offsets[1:])
    flat_H = np.concatenate(hashes)
    # Repeated shingles change no minimum: no set has to be made of them here.
    digests = RMinHash.digest_matrix_from_flat_token_hashes(flat_H, offsets, seeds, seed)
    return np.array(digests.to_rows(), np.uint32).reshape(len(texts), seeds)


def similarity(
    first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64], kind: str = "union"
) -> float:
    """Shingles that two texts have in common, over those in both together; 1 for two empty ones.

    Args:
        first, second: different shingle hashes of each text, sorted.
        kind: "union" is Jaccard's; "min" and "max" divide by the smaller or larger set.
    """
    if not len(first) or not len(second):
        return float(len(first) == len(second))
    common = len(np.intersect1d(first, second, assume_unique=True))
    whole = {
        "union": len(first) + len(second) - common,
        "min": min(len(first), len(second)),
        "max": max(len(first), len(second)),
    }[kind]
    return common / whole
