"""The text of chunks, as embedders read it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megatron.tokenizer import Tokenizer


def chunk_texts(tokenizer: Tokenizer, tokens: Iterable[npt.NDArray[np.integer]]) -> list[str]:
    """The text of chunks of tokens, [...] each, without end-of-document tokens, which also pad
    chunks."""
    eod = tokenizer.eod
    return [tokenizer.detokenize(row[row != eod].tolist()) for row in tokens]
