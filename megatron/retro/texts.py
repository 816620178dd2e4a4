"""The text of chunks, for an embedder."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron.tokenizer import Tokenizer


def chunk_texts(
    tokenizer: Tokenizer, tokens_NM: Iterable[npt.NDArray[np.integer]], eod: int | None
) -> list[str]:
    """The text of chunks, int [N, M] or a list of N arrays; without end-of-document tokens ``eod``,
    which also pad chunks."""
    rows = (row.tolist() for row in tokens_NM)
    return [tokenizer.detokenize([token for token in row if token != eod]) for row in rows]
