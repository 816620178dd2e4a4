"""What the rest of the project knows of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

TextSource = Callable[[], Iterable[str]]
"""Gives texts, the same ones each time it is called."""
TokenIds = npt.NDArray[np.int32]
"""The ids of one text, 1-D."""
WordStarts = npt.NDArray[np.bool_]
"""Whether each token begins a word, [vocab_size]."""


class Tokenizer(Protocol):
    """Turns text into token ids and back.

    The ids of special tokens (`eod`, `cls`, ... `eos`) raise a ValueError that names the vocabulary
    where it has no such token.
    """

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is below it. Padding for tensor parallelism is not counted."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def cls(self) -> int:
        """Id that begins a sequence of BERT's."""

    @property
    def sep(self) -> int:
        """Id that ends each sentence in a sequence of BERT's."""

    @property
    def pad(self) -> int:
        """Id that fills up a sequence."""

    @property
    def mask(self) -> int:
        """Id that stands for a token to be predicted."""

    @property
    def bos(self) -> int:
        """Id that begins a text."""

    @property
    def eos(self) -> int:
        """Id that ends a text."""

    @property
    def sentinels(self) -> list[int]:
        """Ids of `<extra_id_0>`, `<extra_id_1>` and on, T5's spans; empty where there are none."""

    @property
    def word_starts(self) -> WordStarts:
        """Whether a token begins a word, for masking words whole, [vocab_size], read-only.

        WordPiece: all but those with `##`. SentencePiece and the byte-level encodings: those that
        begin with the space before a word (so the first word of a text need not have a mark), with
        white space, and the special tokens.
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
