"""The text of chunks, as embedders read it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron.tokenizer import Tokenizer


def chunk_texts(tokenizer: Tokenizer, tokens: Iterable[np.ndarray]) -> list[str]:
    """The text of chunks of tokens, int64 [...] each, without end-of-document tokens."""
    eod = tokenizer.eod
    return [tokenizer.detokenize(row[row != eod].tolist()) for row in tokens]
