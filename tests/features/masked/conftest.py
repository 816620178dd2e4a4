"""A corpus whose tokens are all different, and a vocabulary for it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pytest

FIRST_TOKEN = 1000
VOCAB_SIZE = 400_000
CLS, SEP, PAD, MASK, EOS = 1, 2, 0, 3, 4
SENTINELS = list(range(100, 200))


class CountingDocuments:
    """Sentences of documents; the tokens count up from FIRST_TOKEN through all of them."""

    prefix = "counting"

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self.sequence_lengths = np.array([n for document in documents for n in document], np.int32)
        self.document_indices = np.cumsum([0, *map(len, documents)])
        self.starts = np.cumsum([0, *self.sequence_lengths])

    @property
    def lengths_digest(self) -> str:
        return hashlib.md5(self.sequence_lengths.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        available = int(self.sequence_lengths[index])
        length = available - offset if length is None else length
        assert 0 <= offset <= offset + length <= available
        start = FIRST_TOKEN + int(self.starts[index]) + offset
        return np.arange(start, start + length, dtype=np.int32)

    def verify(self) -> None:
        pass

    def document_of(self, token: int) -> int:
        """Number of the document that holds a token."""
        sequence = np.searchsorted(self.starts, token - FIRST_TOKEN, side="right") - 1
        return int(np.searchsorted(self.document_indices, sequence, side="right") - 1)


@dataclass(frozen=True)
class CountingTokenizer:
    """Two of three tokens begin a word."""

    cls: int = CLS
    sep: int = SEP
    pad: int = PAD
    mask: int = MASK
    eos: int = EOS
    bos: int = 5
    vocab_size: int = VOCAB_SIZE
    sentinels: list[int] = field(default_factory=lambda: list(SENTINELS))

    @cached_property
    def word_starts(self) -> np.ndarray:
        return np.arange(self.vocab_size) % 3 != 2


@pytest.fixture
def counting() -> Callable[[Sequence[Sequence[int]]], CountingDocuments]:
    """Makes documents of the lengths of their sentences."""
    return CountingDocuments


@pytest.fixture
def prose() -> CountingDocuments:
    """400 documents of 0 to 40 sentences of 0 to 45 tokens, and a sentence of 700."""
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 45, rng.integers(0, 40)).tolist() for _ in range(400)]
    documents[17][3:4] = [700]
    return CountingDocuments(documents)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    """Specials below FIRST_TOKEN."""
    return CountingTokenizer()
