"""Tokenizers for text that consists of token ids as numbers, used for data without a tokenizer."""

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


class _Integers(Tokenizer):
    """Tokenizer for text that consists of ids from 0 to N-1, separated by white space."""

    writes_text = False

    def __init__(self, source: str, size: int, ids: SpecialIds, hint: str = "") -> None:
        """Set N to `size`. `vocab_size` is N, or N + 1 with an end-of-document token."""
        super().__init__(source, size if ids.eod is None else size + 1, ids, hint)
        self._size = size

    def _find_word_starts(self) -> WordStarts:
        return np.ones(self.vocab_size, np.bool_)

    def _encode(self, text: str) -> TokenIds:
        return np.array([self._id(word) for word in text.split()], np.int32)

    def _id(self, word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise ValueError(
                f"{type(self).__name__} reads integers between white space, but found "
                f"{word[:40]!r}{self.hint}"
            ) from None
        if not 0 <= value < self._size:
            raise ValueError(
                f"token id {value} in the text is outside 0 to {self._size - 1} "
                f"(--vocab-size {self._size})"
            )
        return value


class NullTokenizer(_Integers):
    """Tokenizer for text that consists of ids from 0 to N-1. N is the end-of-document token."""

    def __init__(self, size: int) -> None:
        """Set N to `size`, so that `vocab_size` is N + 1."""
        ids = SpecialIds(eos=size, eod=size)
        super().__init__("--tokenizer-type NullTokenizer", size, ids)

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> NullTokenizer:
        return cls(_size(config, " (one more is added for the end of a document)"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the ids in decimal, separated by spaces. The end-of-document token is `<eod>`."""
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


class IdTokenizer(_Integers):
    """Tokenizer for text that consists of ids from 0 to N-1, without special tokens. It is used for
    indexed data whose tokenizer is unknown."""

    def __init__(self, size: int) -> None:
        """Set both N and `vocab_size` to `size`."""
        hint = (
            ": name the tokenizer of the data, for example with --tokenizer-type GPT2BPETokenizer "
            "--vocab-file vocab.json --merge-file merges.txt, or for BERT and T5 "
            "--vocab-file vocab.txt"
        )
        source = f"--vocab-size {size}, given without a tokenizer,"
        super().__init__(source, size, SpecialIds(), hint)

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> IdTokenizer:
        return cls(_size(config))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the ids in decimal, separated by spaces."""
        self._check_ids(ids)
        return " ".join(map(str, ids))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write nothing. The folder is for the files of the data's own tokenizer."""


def _size(config: TokenizerConfig, more: str = "") -> int:
    """Return --vocab-size. Raises ConfigError if it is missing or too small."""
    refuse_extra_ids(config)
    if config.vocab_size is None or config.vocab_size < 1:
        given = "is missing" if config.vocab_size is None else f"is {config.vocab_size}"
        raise ConfigError(
            f"--vocab-size {given}; --tokenizer-type {config.tokenizer_type} needs the number of "
            f"token ids, 1 or more{more}"
        )
    return config.vocab_size
