"""The tokenizer for data that already is numbers, and for trials without a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.files import refuse_extra_ids, write_json, write_text
from megatron.tokenizer.protocol import TokenIds, WordStarts
from megatron.tokenizer.special import SpecialIds, SpecialTokens

_EOD_TEXT = "<eod>"


class NullTokenizer(SpecialTokens):
    """Text is integers between white space: ids 0 to N-1, and N for the end of a document."""

    def __init__(self, size: int) -> None:
        """`size` is N, so `vocab_size` is N + 1."""
        super().__init__("--tokenizer-type NullTokenizer", SpecialIds(eos=size, eod=size))
        self._size = size

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> NullTokenizer:
        """From --vocab-size."""
        refuse_extra_ids(config)
        if config.vocab_size is None or config.vocab_size < 1:
            given = "is missing" if config.vocab_size is None else f"is {config.vocab_size}"
            raise ConfigError(
                f"--vocab-size {given}; --tokenizer-type NullTokenizer needs the number of token "
                "ids, 1 or more (one more is added for the end of a document)"
            )
        return cls(config.vocab_size)

    @property
    def vocab_size(self) -> int:
        """N + 1."""
        return self._size + 1

    def tokenize(self, text: str) -> list[int]:
        """The integers in the text.

        Raises:
            ValueError: a word is no integer, or outside 0 to N-1.
        """
        return [self._id(word) for word in text.split()]

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The integers in each text."""
        return [np.array(self.tokenize(text), np.int32) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids in decimal, one space between; the end of a document as `<eod>`."""
        for i in ids:
            if not 0 <= i <= self._size:
                raise ValueError(f"token id {i} is outside the vocabulary, 0 to {self._size}")
        return " ".join(_EOD_TEXT if i == self._size else str(i) for i in ids)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes a word-level tokenizer over the decimal numbers."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {str(i): i for i in range(self._size)} | {_EOD_TEXT: self._size}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=_EOD_TEXT))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens([_EOD_TEXT])
        write_text(Path(directory, "tokenizer.json"), tokenizer.to_str(pretty=True))
        write_json(
            Path(directory, "tokenizer_config.json"),
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOD_TEXT},
        )

    def _find_word_starts(self) -> WordStarts:
        return np.ones(self.vocab_size, np.bool_)

    def _id(self, word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise ValueError(
                f"NullTokenizer reads integers between white space, but found {word[:40]!r}"
            ) from None
        if not 0 <= value < self._size:
            raise ValueError(
                f"token id {value} in the text is outside 0 to {self._size - 1} "
                f"(--vocab-size {self._size})"
            )
        return value
