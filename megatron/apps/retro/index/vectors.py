"""Vectors of the chunks of a database.

Shape suffixes: N chunks, M tokens of a chunk, D elements of a vector.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megatron.apps.retro.embedding.texts import chunk_texts
from megatron.apps.retro.preprocessing import Preprocessing

_CHUNKS_AT_ONCE = 4096


def chunk_vectors(
    work: Preprocessing,
    chunks_N: npt.NDArray[np.int64],
    advance: Callable[[int], None] = lambda count: None,
) -> npt.NDArray[np.float32]:
    """The vectors [N, D] of chunks of the database, by number. ``advance`` is told how many have
    just been embedded."""
    vectors_ND = np.empty((len(chunks_N), work.embedder.width), np.float32)
    for start in range(0, len(chunks_N), _CHUNKS_AT_ONCE):
        run = slice(start, start + _CHUNKS_AT_ONCE)
        tokens_NM = work.database.tokens(chunks_N[run])
        vectors_ND[run] = work.embedder.embed(chunk_texts(work.tokenizer, tokens_NM))
        advance(len(tokens_NM))
    return vectors_ND
