"""What the rest of the project knows of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
"""The ids of one text, 1-D."""


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is below it. Padding for tensor parallelism is not counted."""

    @property
    def eod(self) -> int:
        """Id that ends a document.

        Raises:
            ValueError: the vocabulary has none.
        """

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text.

        Raises:
            ValueError: the text cannot be tokenized, for example a lone surrogate.
        """

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text; the fast way for many."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 (a character cut in two) become U+FFFD.

        Raises:
            ValueError: an id is not in the vocabulary.
        """

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the files from which `transformers.AutoTokenizer.from_pretrained(directory)`
        makes a tokenizer with the same ids."""
