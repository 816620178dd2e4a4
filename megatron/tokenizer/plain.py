"""Bytes as tokens: a vocabulary that needs no file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer.base import (
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    refuse_extra_ids,
    sentinel_names,
    write_pretrained,
)
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE

_BYTES = 256


class ByteLevelTokenizer(Tokenizer):
    """The UTF-8 bytes of a text, and special tokens that no text contains."""

    joins_bytes = True

    def __init__(self, first_byte: int, specials: dict[str, int], extra_ids: int = 0) -> None:
        """Byte b has the id `first_byte` + b. `specials` are ids by `SpecialIds` name ("eos", ...),
        which fill up the ids below and above those of the bytes without a gap; other names ("unk")
        stand for ids that are not used."""
        above = first_byte + _BYTES + sum(i >= first_byte for i in specials.values())
        named = {name: i for name, i in specials.items() if name in SpecialIds.__annotations__}
        sentinels = tuple(range(above, above + extra_ids))
        super().__init__(
            "the vocabulary of bytes",
            above + extra_ids,
            SpecialIds(**named, eod=specials["eos"], sentinels=sentinels),
        )
        self._first_byte = first_byte
        self._text_of_special = {i: f"<{name}>" for name, i in specials.items()}
        self._text_of_special |= dict(zip(sentinels, sentinel_names(extra_ids), strict=True))

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> ByteLevelTokenizer:
        """ByteLevelTokenizer, in NeMo's numbering, or CharacterLevelTokenizer of 2019. The latter
        had ids for characters 0 to 255 after eight commands; for ASCII these are bytes."""
        if config.tokenizer_type == "CharacterLevelTokenizer":
            names = ("pad", "eos", "bos", "unk", "sep", "L2R", "cls", "mask")
            return cls(8, {name: i for i, name in enumerate(names)}, config.vocab_extra_ids)
        return cls(0, {"pad": 256, "bos": 257, "eos": 258}, config.vocab_extra_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens by their names."""
        self._check_ids(ids)
        parts = (self.token_bytes[i] for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: str | Path) -> None:
        vocab = {c: self._first_byte + byte for byte, c in enumerate(CHARACTER_OF_BYTE)}
        vocab |= {token: i for i, token in self._text_of_special.items()}
        encoding = tokenizers.Tokenizer(models.BPE(vocab, []))
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoding.decoder = decoders.ByteLevel()
        encoding.add_special_tokens(
            [AddedToken(t, normalized=False, special=True) for t in self._text_of_special.values()]
        )
        write_pretrained(
            directory,
            encoding,
            tokenizer_class="PreTrainedTokenizerFast",
            split_special_tokens=True,  # no text contains a special token
            clean_up_tokenization_spaces=False,
            **self.special_ids.tokens(self._text_of_special),
        )

    def _find_word_starts(self) -> WordStarts:
        marks = np.ones(self._vocab_size, np.bool_)
        marks[self._first_byte : self._first_byte + _BYTES] = False
        marks[[self._first_byte + byte for byte in b" \t\n\r\f\v"]] = True
        return marks

    def _find_special_tokens(self) -> frozenset[int]:
        return frozenset(self._text_of_special)

    def _find_token_bytes(self) -> list[bytes]:
        tokens = {self._first_byte + byte: bytes([byte]) for byte in range(_BYTES)}
        tokens |= {i: name.encode() for i, name in self._text_of_special.items()}
        return [tokens[i] for i in range(self._vocab_size)]

    def _encode(self, text: str) -> TokenIds:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + np.int32(self._first_byte)


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
