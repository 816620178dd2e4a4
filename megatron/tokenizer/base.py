"""Tokenizers' base class and special tokens, and helpers that read and write their files."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, TokenizerConfig
from megatron.util.files import write_whole

TextSource = Callable[[], Iterable[str]]
"""Function that returns the same texts at each call, as an iterable."""
TokenIds = npt.NDArray[np.int32]
"""Token ids of one text, 1-D."""
Offsets = npt.NDArray[np.int64]
"""Character span of each token as start and exclusive end, [tokens, 2]."""
WordStarts = npt.NDArray[np.bool_]
"""Boolean mask of the tokens that begin a word, [vocab_size]."""
_MOST_IDS = 1 << 20
"""Token ids below this limit are allowed. Higher ids must be below 4 times the number of tokens."""
_MOST_BYTES = 1 << 28
"""Maximum size in bytes of a vocabulary file. The largest published ones have 40 MB."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of a vocabulary's special tokens. `Tokenizer` documents the fields."""

    cls: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    eod: int | None = None
    sentinels: tuple[int, ...] = ()

    def tokens(self, token_of_id: Mapping[int, str]) -> dict[str, str]:
        """Return the special tokens, keyed by transformers' names such as "pad_token"."""
        ids = {name: getattr(self, name) for name in ("pad", "bos", "eos", "cls", "sep", "mask")}
        return {f"{name}_token": token_of_id[i] for name, i in ids.items() if i is not None}


class SpecialId:
    """Descriptor for a special token's id. Raises ValueError if the vocabulary lacks the token."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tokenizer: Tokenizer, owner: type) -> int:
        value = getattr(tokenizer.special_ids, self._name)
        if value is None:
            role = f"{self._role} ({self._name})"
            raise ValueError(f"{tokenizer.source} has no token for the {role}{tokenizer.hint}")
        return value


class Tokenizer(ABC):
    """Converter between text and token ids. Reading the id of a special token raises a ValueError
    if the vocabulary has no such token."""

    cls = SpecialId("start of sequence")
    """First token of a BERT sequence."""
    sep = SpecialId("separator")
    """Token after each sentence of a BERT sequence."""
    pad = SpecialId("padding")
    """Token that pads a sequence."""
    mask = SpecialId("mask")
    """Token that replaces a token to be predicted."""
    bos = SpecialId("beginning of text")
    eos = SpecialId("end of text")
    eod = SpecialId("end of document")

    writes_text = True
    """True if the tokenizer encodes natural text, False if it parses ids written as numbers."""
    joins_bytes = False
    """True if decoding ids equals joining their `token_bytes`, with U+FFFD for invalid UTF-8."""

    def __init__(self, source: str, vocab_size: int, ids: SpecialIds, hint: str = "") -> None:
        """Set `source`, the vocabulary's name in error messages, and a `hint` to append to them."""
        self.source, self.special_ids, self.hint = source, ids, hint
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all are smaller. Excludes the padding for tensor parallelism."""
        return self._vocab_size

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end a document or a text. May be empty."""
        ids = self.special_ids.eod, self.special_ids.eos
        return frozenset(token for token in ids if token is not None)

    @property
    def sentinels(self) -> list[int]:
        """Ids of `<extra_id_0>`, `<extra_id_1>`, ..., T5's sentinel tokens. May be empty."""
        return list(self.special_ids.sentinels)

    @functools.cached_property
    def word_starts(self) -> WordStarts:
        """Boolean mask of the tokens that begin a word, [vocab_size]. Used by whole-word masking.

        For WordPiece, these are all tokens without `##`. For SentencePiece and byte-level
        encodings, they are the special tokens and the tokens that begin with white space. A text's
        first word has no space before it, so it may not be marked. The array is read-only.
        """
        marks = self._find_word_starts()
        marks.flags.writeable = False
        return marks

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """UTF-8 bytes that each token adds to a text when it is not the first token, [vocab_size].
        A token that encodes part of a character has only those bytes. A special token has the bytes
        of its name if `detokenize` writes names. An unused id has no bytes."""
        return self._find_token_bytes()

    @functools.cached_property
    def special_tokens(self) -> frozenset[int]:
        """Ids of the tokens that represent no text."""
        return self._find_special_tokens()

    @functools.cached_property
    def byte_pieces(self) -> frozenset[int]:
        """Ids of the tokens for single bytes in a vocabulary of whole characters. Consecutive ones
        must be decoded together. Empty for byte-level encodings."""
        return self._find_byte_pieces()

    @functools.cached_property
    def newline_tokens(self) -> list[int]:
        """Ids of the tokens that begin with a line break."""
        return [i for i, token in enumerate(self.token_bytes) if token[:1] in (b"\n", b"\r")]

    def tokenize(self, text: str) -> list[int]:
        """Return a text's token ids. Raises ValueError if the text has a lone surrogate."""
        return self._encode(text).tolist()

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text. For many texts, this is faster than `tokenize`."""
        return [self._encode(text) for text in texts]

    def tokenize_sentences(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each sentence, without the special tokens that Hugging Face's
        BERT and T5 tokenizers add around a text. A sample joins several sentences and adds its own
        special tokens."""
        return self.tokenize_batch(texts)

    def tokenize_with_offsets(self, text: str) -> tuple[TokenIds, Offsets]:
        """Return a text's token ids, as `tokenize_sentences` does, and the character span of each
        token. Spans refer to the original `text`, even if the tokenizer changes case or accents.
        Raises ValueError if the tokenizer does not provide offsets."""
        raise ValueError(
            f"{self.source} does not say which characters a token stands for, which answers taken "
            "from a text need; use --tokenizer-type BertWordPieceLowerCase, BertWordPieceCase, or "
            "HFTokenizer with a folder that contains tokenizer.json"
        )

    def sample_ids(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of a few texts. Subclasses skip setup that is slow for few."""
        return self.tokenize_sentences(texts)

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids. Invalid UTF-8, such as part of a character, becomes U+FFFD.
        Raises ValueError if an id is not in the vocabulary."""

    @abstractmethod
    def save_pretrained(self, directory: str | Path) -> None:
        """Write the files from which `transformers.AutoTokenizer.from_pretrained(directory)` loads
        a tokenizer with the same ids."""

    @abstractmethod
    def _encode(self, text: str) -> TokenIds: ...

    @abstractmethod
    def _find_word_starts(self) -> WordStarts: ...

    def _find_token_bytes(self) -> list[bytes]:
        """Return the bytes that each token adds after another token. This default is only correct
        if no token is part of a character."""
        ordinary = (i for i in range(self._vocab_size) if i not in self.special_tokens)
        before = next((i for i in ordinary if self.detokenize([i]).strip()), 0)
        start = len(self.detokenize([before]))
        texts = (self.detokenize([before, i])[start:] for i in range(self._vocab_size))
        return [text.encode() for text in texts]

    def _find_special_tokens(self) -> frozenset[int]:
        ids = vars(self.special_ids).values()
        return frozenset(i for i in ids if isinstance(i, int)).union(self.special_ids.sentinels)

    def _find_byte_pieces(self) -> frozenset[int]:
        return frozenset()

    def _check_ids(self, ids: Iterable[int]) -> None:
        for i in ids:
            if not 0 <= i < self._vocab_size:
                raise ValueError(
                    f"token id {i} is outside the vocabulary of {self._vocab_size} ({self.source})"
                )


class TokenizerType(NamedTuple):
    """Definition of a value of `--tokenizer-type`.

    Attributes:
        make: builds the tokenizer. Raises ConfigError, ValueError or FileNotFoundError.
        sized: whether `--vocab-size` determines the size of the tokenizer itself.
        train: trains a missing model on texts, in one process while the others wait.
    """

    make: Callable[[TokenizerConfig], Tokenizer]
    sized: bool = False
    train: Callable[[TokenizerConfig, TextSource], None] | None = None


def offsets_of(encoding: Any) -> tuple[TokenIds, Offsets]:
    """Return the ids and character spans of an encoding from the `tokenizers` library."""
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def required(config: TokenizerConfig, field: str, what: str) -> str:
    """Return a path that this tokenizer type requires. Raises ConfigError if it is not given."""
    value = getattr(config, field)
    if not value:
        flag = "--" + field.replace("_", "-")
        raise ConfigError(f"--tokenizer-type {config.tokenizer_type} needs {flag}: {what}")
    return value


def refuse_extra_ids(config: TokenizerConfig) -> None:
    """Raise ConfigError if --vocab-extra-ids is given for a tokenizer whose files fix its size."""
    if config.vocab_extra_ids:
        raise ConfigError(
            f"--vocab-extra-ids {config.vocab_extra_ids} cannot be used with --tokenizer-type "
            f"{config.tokenizer_type}: its vocabulary is fixed by its files; leave the flag out"
        )


def check_size_of_ids(largest: int, tokens: int, where: str) -> None:
    """Raise ValueError if the largest id is so high that most rows of the embedding would be
    unused. ``tokens`` is the number of tokens."""
    if not 0 <= largest < max(_MOST_IDS, 4 * tokens):
        raise ValueError(
            f"{where} has the token id {largest:,}, but {tokens:,} tokens; ids must be below "
            f"{max(_MOST_IDS, 4 * tokens):,}"
        )


def read_vocabulary_file(path: str | Path, flag: str) -> bytes:
    """Return a regular file's bytes. Raises FileNotFoundError, or ValueError if it is too large."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "is no ordinary file"
        problem = problem if path.exists() else "does not exist"
        raise FileNotFoundError(f"{flag} {path} {problem}; it must be a file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{flag} {path} has more than {_MOST_BYTES:,} bytes: no vocabulary has")
    return content


def read_text(path: str | Path, flag: str) -> str:
    """Return a UTF-8 file's text with its line endings unchanged. Raises FileNotFoundError, or
    ValueError if the file is not UTF-8 or too large for a vocabulary."""
    try:
        return read_vocabulary_file(path, flag).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is not UTF-8 text: {error}") from None


def write_text(path: Path, text: str | bytes) -> None:
    """Write or replace a file atomically and create its folder. Text is encoded as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode() if isinstance(text, str) else text)


def write_pretrained(directory: str | Path, encoding: Any, **settings: Any) -> None:
    """Write a `tokenizers.Tokenizer` to tokenizer.json, and `settings` to tokenizer_config.json."""
    write_text(Path(directory, "tokenizer.json"), encoding.to_str(pretty=True))
    text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
    write_text(Path(directory, "tokenizer_config.json"), text)
