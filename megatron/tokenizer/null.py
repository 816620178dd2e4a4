"""The tokenizer for data that already is numbers, and for trials without a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.base import (
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    refuse_extra_ids,
    write_pretrained,
)

_EOD_TEXT = "<eod>"


class NullTokenizer(Tokenizer):
    """Text is integers between white space: ids 0 to N-1, and N for the end of a document."""

    def __init__(self, size: int) -> None:
        """`size` is N, so `vocab_size` is N + 1."""
        ids = SpecialIds(eos=size, eod=size)
        super().__init__("--tokenizer-type NullTokenizer", size + 1, ids)

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> NullTokenizer:
        refuse_extra_ids(config)
        if config.vocab_size is None or config.vocab_size < 1:
            given = "is missing" if config.vocab_size is None else f"is {config.vocab_size}"
            raise ConfigError(
                f"--vocab-size {given}; --tokenizer-type NullTokenizer needs the number of token "
                "ids, 1 or more (one more is added for the end of a document)"
            )
        return cls(config.vocab_size)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids in decimal, one space between; the end of a document as `<eod>`."""
        self._check_ids(ids)
        return " ".join(_EOD_TEXT if i == self.eod else str(i) for i in ids)

    def save_pretrained(self, directory: str | Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {str(i): i for i in range(self.eod)} | {_EOD_TEXT: self.eod}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=_EOD_TEXT))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens([_EOD_TEXT])
        kind = "PreTrainedTokenizerFast"
        write_pretrained(directory, tokenizer, tokenizer_class=kind, eos_token=_EOD_TEXT)

    def _find_word_starts(self) -> WordStarts:
        return np.ones(self.vocab_size, np.bool_)

    def _encode(self, text: str) -> TokenIds:
        return np.array([self._id(word) for word in text.split()], np.int32)

    def _id(self, word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise ValueError(
                f"NullTokenizer reads integers between white space, but found {word[:40]!r}"
            ) from None
        if not 0 <= value < self.eod:
            raise ValueError(
                f"token id {value} in the text is outside 0 to {self.eod - 1} "
                f"(--vocab-size {self.eod})"
            )
        return value
