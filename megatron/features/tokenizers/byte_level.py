"""Byte-level tokenizer, which needs no vocabulary file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatron.config import TokenizerConfig
from megatron.features.tokenizers.pieces import sentinel_names
from megatron.tokenizer.base import SpecialIds, TokenIds, Tokenizer, WordStarts, write_pretrained
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE

_BYTES = 256


class ByteLevelTokenizer(Tokenizer):
    """Tokenizer whose tokens are UTF-8 bytes. Special tokens never occur in a text."""

    joins_bytes = True

    def __init__(self, first_byte: int, specials: dict[str, int], extra_ids: int = 0) -> None:
        """Byte b has the id `first_byte` + b. `specials` maps names to ids, which must fill the ids
        below and above the bytes without a gap. Names of `SpecialIds` fields ("eos", ...) set these
        fields; any other name ("unk") only reserves its id."""
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
        """Return NeMo's ByteLevelTokenizer, or the CharacterLevelTokenizer of 2019, which had ids
        for characters 0 to 255 after eight special tokens. For ASCII, these are bytes."""
        if config.tokenizer_type == "CharacterLevelTokenizer":
            names = ("pad", "eos", "bos", "unk", "sep", "L2R", "cls", "mask")
            return cls(8, {name: i for i, name in enumerate(names)}, config.vocab_extra_ids)
        return cls(0, {"pad": 256, "bos": 257, "eos": 258}, config.vocab_extra_ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens as `<name>` and invalid UTF-8 as U+FFFD."""
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
            split_special_tokens=True,  # no text contains a special token, so none may be parsed
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
