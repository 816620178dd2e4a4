"""Tokenizers of `transformers`, loaded from a local folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import models

from megatron.config import TokenizerConfig
from megatron.features.tokenizers.pieces import byte_of_piece, sentinel_ids
from megatron.formats.tokenizer_json import WatchedNormalizer
from megatron.formats.transformers_folder import load_as_written
from megatron.tokenizer.base import (
    Offsets,
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    offsets_of,
    refuse_extra_ids,
    required,
)
from megatron.tokenizer.gpt2_bpe import token_bytes
from megatron.util.errors import rust_errors

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_SPACES = frozenset("\u2581 \t\n\v\f\r\u0120\u0109\u010a\u010b\u010c\u010d")
"""First characters of tokens that begin a word: SentencePiece's space symbol, white space, and
white space as written in the byte-level alphabet (gpt2_bpe.py)."""


class HFTokenizer(Tokenizer):
    """Tokenizer loaded from a local folder with the folder's own settings. Ids are those of its
    tokenizer.json or, without this file, of `AutoTokenizer.from_pretrained(folder)(text)`. If the
    folder's tokenizer adds a beginning-of-sequence token to texts (Llama), this one does too."""

    def __init__(self, directory: str | Path) -> None:
        """Load the tokenizer from the folder without accessing the network. Raises
        FileNotFoundError if the folder does not exist, and ValueError if `transformers` cannot read
        it as a tokenizer."""
        directory = Path(directory)
        if not directory.is_dir():
            problem = "is a file" if directory.exists() else "does not exist"
            raise FileNotFoundError(
                f"--tokenizer-model {directory} {problem}; it must be a local folder with the "
                "files of a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json)"
            )
        self._tokenizer: Any = load_as_written(directory)
        self._watched: WatchedNormalizer | None = None
        # transformers resets the truncation and padding settings before each call; do it here, once
        if self._tokenizer.is_fast:
            backend = self._tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = self._tokenizer.split_special_tokens
            self._watched = WatchedNormalizer.of(backend, f"--tokenizer-model {directory}")
        self.joins_bytes = self._tokenizer.is_fast and self._decoders() == {"ByteLevel"}
        vocab = self._tokenizer.get_vocab()
        roles = ("cls", "sep", "pad", "mask", "bos", "eos")
        ids = {role: getattr(self._tokenizer, f"{role}_token_id") for role in roles}
        super().__init__(
            f"--tokenizer-model {directory}",
            max(vocab.values()) + 1,
            SpecialIds(**ids, eod=ids["eos"], sentinels=sentinel_ids(vocab)),
            hint=": set it in its tokenizer_config.json (eos_token ends a document)",
        )

    @classmethod
    def from_config(cls, config: TokenizerConfig) -> HFTokenizer:
        refuse_extra_ids(config)
        return cls(required(config, "tokenizer_model", "a folder with a Hugging Face tokenizer"))

    @property
    def transformers_tokenizer(self) -> Any:
        """The `transformers` tokenizer, for features that only it has, such as chat templates."""
        return self._tokenizer

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text. Fast tokenizers use all cores unless the environment
        variable TOKENIZERS_PARALLELISM is false."""
        return [np.array(ids, np.int32) for ids in self._ids(texts)]

    def tokenize_sentences(self, texts: Sequence[str]) -> list[TokenIds]:
        return [np.array(ids, np.int32) for ids in self._ids(texts, template=False)]

    def tokenize_with_offsets(self, text: str) -> tuple[TokenIds, Offsets]:
        if not self._tokenizer.is_fast:
            return super().tokenize_with_offsets(text)
        backend = self._tokenizer.backend_tokenizer
        with self._refusing([text]):
            return offsets_of(backend.encode(text, add_special_tokens=False))

    def detokenize(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        with rust_errors(f"{self.source} cannot make a text of ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save_pretrained(self, directory: str | Path) -> None:
        try:
            self._tokenizer.save_pretrained(directory)
        except Exception as error:
            # Rust raises a bare Exception, such as "No space left on device (os error 28)".
            if type(error) is not Exception or "os error" not in str(error):
                raise
            raise OSError(f"{directory}: the tokenizer cannot be written: {error}") from error

    def _find_word_starts(self) -> WordStarts:
        vocab = self._tokenizer.get_vocab()
        pieces = self._is_wordpiece(vocab)
        marks = np.zeros(self._vocab_size, np.bool_)
        for token, i in vocab.items():
            marks[i] = not token.startswith("##") if pieces else token[:1] in _SPACES
        ids = self.special_ids
        # in GPT-2 unk, bos and eos are one token
        unknown = {self._tokenizer.unk_token_id} - {ids.bos, ids.eos}
        for i, added in self._tokenizer.added_tokens_decoder.items():
            marks[i] |= added.special and (pieces or i not in unknown)
        return marks

    def _find_special_tokens(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        own = (i for i, token in added if token.special)
        return super()._find_special_tokens().union(own, self._tokenizer.all_special_ids)

    def _find_token_bytes(self) -> list[bytes]:
        if not self.joins_bytes:
            tokens = super()._find_token_bytes()
            if self.byte_pieces:
                for token, i in self._tokenizer.get_vocab().items():
                    if _BYTE_PIECE.fullmatch(token):  # an id may have several names
                        tokens[i] = byte_of_piece(token)
            return tokens
        tokens = [b""] * self._vocab_size
        for token, i in self._tokenizer.get_vocab().items():
            tokens[i] = token_bytes(token)
        return tokens

    def _find_byte_pieces(self) -> frozenset[int]:
        if not self._tokenizer.is_fast or "ByteFallback" not in self._decoders():
            return frozenset()
        vocab = self._tokenizer.get_vocab()
        return frozenset(i for token, i in vocab.items() if _BYTE_PIECE.fullmatch(token))

    def _decoders(self) -> set[str]:
        """Return the types of the decoder steps in the fast tokenizer's tokenizer.json."""
        decoder = json.loads(self._tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        return {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}

    def _is_wordpiece(self, vocab: dict[str, int]) -> bool:
        if self._tokenizer.is_fast:
            return isinstance(self._tokenizer.backend_tokenizer.model, models.WordPiece)
        return "##s" in vocab and "[CLS]" in vocab

    def _encode(self, text: str) -> TokenIds:
        return self.tokenize_batch([text])[0]

    def _ids(self, texts: Sequence[str], template: bool = True) -> list[list[int]]:
        """Return the ids of each text. With ``template``, add the special tokens that the folder's
        tokenizer adds to a text."""
        if not texts:
            return []
        with self._refusing(texts):
            if self._tokenizer.is_fast:  # encode without masks, offsets and warnings
                encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(
                    list(texts), add_special_tokens=template
                )
                return [encoding.ids for encoding in encoded]
            return self._tokenizer(list(texts), add_special_tokens=template, verbose=False)[
                "input_ids"
            ]

    @contextmanager
    def _refusing(self, texts: Sequence[str]) -> Iterator[None]:
        """Check the texts, then convert errors of a library call inside the ``with`` block. Raises
        ValueError if a text cannot or must not be encoded."""
        for text in texts:
            # raises a clear ValueError for a lone surrogate, instead of a later TypeError
            text.encode()
            if self._watched is not None:
                self._watched.check(text)
        with rust_errors(f"{self.source} cannot encode a text"):
            yield
