"""Tokenizers that encode a text at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from megatron.tokenizer.protocol import TokenIds
from megatron.tokenizer.special import SpecialTokens


class TextwiseTokenizer(SpecialTokens):
    """What follows from how one text is encoded; `_vocab_size` is the number of ids."""

    _vocab_size: int

    @abstractmethod
    def _encode(self, text: str) -> TokenIds:
        """Ids of a text; raises ValueError for one that cannot be encoded."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest one plus one, special tokens included."""
        return self._vocab_size

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text."""
        return self._encode(text).tolist()

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text."""
        return [self._encode(text) for text in texts]
