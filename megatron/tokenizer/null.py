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


class _Integers(Tokenizer):
    """Text is integers between white space, from 0 to N-1."""

    writes_text = False

    def __init__(self, source: str, size: int, ids: SpecialIds, hint: str = "") -> None:
        """`size` is N."""
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
    """Text is integers between white space: ids 0 to N-1, and N for the end of a document."""

    def __init__(self, size: int) -> None:
        """`size` is N, so `vocab_size` is N + 1."""
        ids = SpecialIds(eos=size, eod=size)
        super().__init__("--tokenizer-type NullTokenizer", size, ids)

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> NullTokenizer:
        return cls(_size(config, " (one more is added for the end of a document)"))

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


class IdTokenizer(_Integers):
    """Text is integers between white space: ids 0 to N-1, none of which has a meaning of its own.
    It stands for the unknown tokenizer of data that a run reads as numbers."""

    def __init__(self, size: int) -> None:
        """`size` is N, and `vocab_size` too."""
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
        """The ids in decimal, one space between."""
        self._check_ids(ids)
        return " ".join(map(str, ids))

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes nothing: the files of the data's own tokenizer belong there."""


def _size(config: TokenizerConfig, more: str = "") -> int:
    """--vocab-size; ConfigError if it is missing or too small."""
    refuse_extra_ids(config)
    if config.vocab_size is None or config.vocab_size < 1:
        given = "is missing" if config.vocab_size is None else f"is {config.vocab_size}"
        raise ConfigError(
            f"--vocab-size {given}; --tokenizer-type {config.tokenizer_type} needs the number of "
            f"token ids, 1 or more{more}"
        )
    return config.vocab_size
