"""Any tokenizer of `transformers`, from a local folder."""

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
from megatron.formats.tokenizer_json import WatchedNormalizer
from megatron.formats.transformers_folder import load_as_written
from megatron.tokenizer.base import (
    Offsets,
    SpecialIds,
    TokenIds,
    Tokenizer,
    WordStarts,
    byte_of_piece,
    offsets_of,
    refuse_extra_ids,
    required,
    sentinel_ids,
)
from megatron.tokenizer.gpt2_bpe import token_bytes
from megatron.util.errors import rust_errors

_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_SPACES = frozenset("\u2581 \t\n\v\f\r\u0120\u0109\u010a\u010b\u010c\u010d")
"""First characters of tokens that begin a word: SentencePiece's mark for a space, white space, and
the byte alphabet's characters for white space (gpt2_bpe.py)."""


class HFTokenizer(Tokenizer):
    """The tokenizer of a folder, with its own settings. Ids come from its tokenizer.json, or
    without one from `AutoTokenizer.from_pretrained(folder)(text)`: if the folder sets a
    beginning-of-sequence token at the start of texts (Llama), it is added here too."""

    def __init__(self, directory: str | Path) -> None:
        """Loads the folder, and nothing from the network. Raises FileNotFoundError; ValueError if
        `transformers` cannot read it as a tokenizer."""
        directory = Path(directory)
        if not directory.is_dir():
            problem = "is a file" if directory.exists() else "does not exist"
            raise FileNotFoundError(
                f"--tokenizer-model {directory} {problem}; it must be a local folder with the "
                "files of a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json)"
            )
        self._tokenizer: Any = load_as_written(directory)
        self._watched: WatchedNormalizer | None = None
        if self._tokenizer.is_fast:  # what transformers sets before each of its own calls
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
        """The tokenizer of `transformers`, for features only it has, such as a chat template."""
        return self._tokenizer

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text; fast tokenizers use all cores unless TOKENIZERS_PARALLELISM=false."""
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
            # The Rust library raises a bare Exception: "No space left on device (os error 28)".
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
        unknown = {self._tokenizer.unk_token_id} - {ids.bos, ids.eos}  # one token, in GPT-2
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
        """Names of the steps by which `tokenizers` makes a text of tokens."""
        decoder = json.loads(self._tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        return {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}

    def _is_wordpiece(self, vocab: dict[str, int]) -> bool:
        if self._tokenizer.is_fast:
            return isinstance(self._tokenizer.backend_tokenizer.model, models.WordPiece)
        return "##s" in vocab and "[CLS]" in vocab

    def _encode(self, text: str) -> TokenIds:
        return self.tokenize_batch([text])[0]

    def _ids(self, texts: Sequence[str], template: bool = True) -> list[list[int]]:
        """`template` puts the special tokens around each text that the folder has for them."""
        if not texts:
            return []
        with self._refusing(texts):
            if self._tokenizer.is_fast:  # without masks, offsets and warnings
                encoded = self._tokenizer.backend_tokenizer.encode_batch_fast(
                    list(texts), add_special_tokens=template
                )
                return [encoding.ids for encoding in encoded]
            return self._tokenizer(list(texts), add_special_tokens=template, verbose=False)[
                "input_ids"
            ]

    @contextmanager
    def _refusing(self, texts: Sequence[str]) -> Iterator[None]:
        """Around a call of the library; ValueError if it cannot encode the texts, or must not."""
        for text in texts:
            text.encode()  # a lone surrogate raises a clear ValueError, not a TypeError
            if self._watched is not None:
                self._watched.check(text)
        with rust_errors(f"{self.source} cannot encode a text"):
            yield
