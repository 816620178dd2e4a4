"""The base class of all tokenizers, special tokens, and reading and writing of files."""

from __future__ import annotations

import functools
import json
import re
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
"""Gives texts, the same ones each time it is called."""
TokenIds = npt.NDArray[np.int32]
"""The ids of one text, 1-D."""
Offsets = npt.NDArray[np.int64]
"""The characters of a text that each token covers: first, and behind the last, [tokens, 2]."""
WordStarts = npt.NDArray[np.bool_]
"""Flags of tokens that begin a word, [vocab_size]."""
_SENTINEL = re.compile(r"<extra_id_([0-9]{1,6})>")
_MOST_IDS = 1 << 20
"""Ids that any vocabulary may use, with gaps; a larger one may use four for each token."""
_MOST_BYTES = 1 << 28
"""Bytes of a vocabulary at most; the largest that are published have 40 MB."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens that a vocabulary has; `Tokenizer` documents them."""

    cls: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    eod: int | None = None
    sentinels: tuple[int, ...] = ()

    def tokens(self, token_of_id: Mapping[int, str]) -> dict[str, str]:
        """As tokenizer_config.json of `transformers` names them: "pad_token" and so on."""
        ids = {name: getattr(self, name) for name in ("pad", "bos", "eos", "cls", "sep", "mask")}
        return {f"{name}_token": token_of_id[i] for name, i in ids.items() if i is not None}


class SpecialId:
    """An attribute of a tokenizer; a ValueError names the vocabulary that lacks the token."""

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
    """Turns text into token ids and back. Special ids raise a ValueError where the vocabulary has
    no such token."""

    cls = SpecialId("start of sequence")
    """Begins a sequence of BERT's."""
    sep = SpecialId("separator")
    """Ends each sentence in a sequence of BERT's."""
    pad = SpecialId("padding")
    """Fills up a sequence."""
    mask = SpecialId("mask")
    """Stands for a token to be predicted."""
    bos = SpecialId("beginning of text")
    eos = SpecialId("end of text")
    eod = SpecialId("end of document")

    writes_text = True
    """True if its texts are texts, and not a notation for numbers."""
    joins_bytes = False
    """True if the text of ids is their `token_bytes`, joined, with U+FFFD for what is not UTF-8."""

    def __init__(self, source: str, vocab_size: int, ids: SpecialIds, hint: str = "") -> None:
        """`source` names the vocabulary in messages, `hint` how to get missing special tokens."""
        self.source, self.special_ids, self.hint = source, ids, hint
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is below it. Padding for tensor parallelism is not counted."""
        return self._vocab_size

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a document or a text; there may be none."""
        ids = self.special_ids.eod, self.special_ids.eos
        return frozenset(token for token in ids if token is not None)

    @property
    def sentinels(self) -> list[int]:
        """Ids of `<extra_id_0>`, `<extra_id_1>` and on, T5's spans; may be empty."""
        return list(self.special_ids.sentinels)

    @functools.cached_property
    def word_starts(self) -> WordStarts:
        """True if a token begins a word, for whole-word masking, [vocab_size], read-only.

        WordPiece: all but those with `##`. SentencePiece and the byte-level encodings: those that
        begin with the space before a word (so the first word of a text need not have a mark), with
        white space, and the special tokens.
        """
        marks = self._find_word_starts()
        marks.flags.writeable = False
        return marks

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes that each token adds to a text that it is not the first of, in UTF-8, [vocab_size];
        of a character that several tokens make, the bytes of each. Special tokens have their names,
        if `detokenize` writes these; ids that are not used have nothing."""
        return self._find_token_bytes()

    @functools.cached_property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that stand for no text of their own."""
        return self._find_special_tokens()

    @functools.cached_property
    def byte_pieces(self) -> frozenset[int]:
        """Tokens that stand for a byte each, in a vocabulary whose others are whole characters: a
        run of them is decoded as a whole. None in byte-level encodings."""
        return self._find_byte_pieces()

    @functools.cached_property
    def newline_tokens(self) -> list[int]:
        """Tokens that begin with the end of a line."""
        return [i for i, token in enumerate(self.token_bytes) if token[:1] in (b"\n", b"\r")]

    def tokenize(self, text: str) -> list[int]:
        """Ids of one text; ValueError if it cannot be tokenized, for example a lone surrogate."""
        return self._encode(text).tolist()

    def tokenize_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of each text; the fast way for many."""
        return [self._encode(text) for text in texts]

    def tokenize_sentences(self, texts: Sequence[str]) -> list[TokenIds]:
        """Ids of sentences, several of which make a sample: as `tokenize_batch`, without the tokens
        that BERT's and T5's files in Hugging Face's form put around a text, because the samples
        have their own."""
        return self.tokenize_batch(texts)

    def tokenize_with_offsets(self, text: str) -> tuple[TokenIds, Offsets]:
        """Ids of one text, as `tokenize_sentences` gives them, and the characters of it that each
        token stands for: whatever the tokenizer changes (case, accents), they are those of `text`.
        Raises ValueError if the tokenizer does not know them."""
        raise ValueError(
            f"{self.source} does not say which characters a token stands for, which answers taken "
            "from a text need; use --tokenizer-type BertWordPieceLowerCase, BertWordPieceCase, or "
            "HFTokenizer with a folder that contains tokenizer.json"
        )

    def sample_ids(self, texts: Sequence[str]) -> list[TokenIds]:
        """:meth:`tokenize_sentences` of a few texts, where nothing else may be tokenized."""
        return self.tokenize_sentences(texts)

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 (a character cut in two) become U+FFFD. Raises
        ValueError if an id is not in the vocabulary."""

    @abstractmethod
    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the files from which `transformers.AutoTokenizer.from_pretrained(directory)`
        makes a tokenizer with the same ids."""

    @abstractmethod
    def _encode(self, text: str) -> TokenIds: ...

    @abstractmethod
    def _find_word_starts(self) -> WordStarts: ...

    def _find_token_bytes(self) -> list[bytes]:
        """For tokenizers none of whose tokens is a part of a character: what a token adds to
        another."""
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


FileNames = tuple[tuple[str, tuple[str, ...]], ...]
"""Names that the file of each field of a configuration may have, with `{}` for the model."""


class PublishedFiles(NamedTuple):
    """The published model whose files `--cache-dir` may have.

    Attributes:
        model: the one that is meant without `--tokenizer-model-type`.
        files: the names of its files.
        by_name: whether `--tokenizer-model-type` names another model, or the path of its file.
    """

    model: str
    files: FileNames
    by_name: bool = False


class TokenizerType(NamedTuple):
    """A value of `--tokenizer-type`.

    Attributes:
        make: the tokenizer of a configuration. Raises ConfigError, ValueError, FileNotFoundError.
        sized: whether `--vocab-size` is a size of the tokenizer itself.
        published: its files in `--cache-dir`.
        train: trains a model that does not exist on texts, in one process while others wait.
    """

    make: Callable[[TokenizerConfig], Tokenizer]
    sized: bool = False
    published: PublishedFiles | None = None
    train: Callable[[TokenizerConfig, TextSource], None] | None = None


def offsets_of(encoding: Any) -> tuple[TokenIds, Offsets]:
    """Ids and offsets of a text that `tokenizers` encoded."""
    return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)


def byte_of_piece(piece: str) -> bytes:
    """The byte that SentencePiece's piece `<0xE6>` stands for."""
    return bytes.fromhex(piece[3:5])


def sentinel_ids(vocab: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of `<extra_id_0>`, `<extra_id_1>` and on in a vocabulary, up to the first one missing."""
    sentinels = {int(m[1]): i for token, i in vocab.items() if (m := _SENTINEL.fullmatch(token))}
    ids: list[int] = []
    while len(ids) in sentinels:
        ids.append(sentinels[len(ids)])
    return tuple(ids)


def sentinel_names(count: int) -> list[str]:
    return [f"<extra_id_{n}>" for n in range(count)]


def required(config: TokenizerConfig, field: str, what: str) -> str:
    """The value of a path field that this tokenizer type needs; ConfigError without one."""
    value = getattr(config, field)
    if not value:
        flag = "--" + field.replace("_", "-")
        raise ConfigError(f"--tokenizer-type {config.tokenizer_type} needs {flag}: {what}")
    return value


def refuse_extra_ids(config: TokenizerConfig) -> None:
    """Raises ConfigError on --vocab-extra-ids, for a vocabulary that is fixed by its files."""
    if config.vocab_extra_ids:
        raise ConfigError(
            f"--vocab-extra-ids {config.vocab_extra_ids} cannot be used with --tokenizer-type "
            f"{config.tokenizer_type}: its vocabulary is fixed by its files; leave the flag out"
        )


def check_size_of_ids(largest: int, tokens: int, where: str) -> None:
    """Raises ValueError if ids are so large that a table of their embeddings would mostly be of
    tokens that do not exist."""
    if not 0 <= largest < max(_MOST_IDS, 4 * tokens):
        raise ValueError(
            f"{where} has the token id {largest:,}, but {tokens:,} tokens; ids must be below "
            f"{max(_MOST_IDS, 4 * tokens):,}"
        )


def read_vocabulary_file(path: str | Path, flag: str) -> bytes:
    """A whole file. Raises FileNotFoundError; ValueError if it is too large for a vocabulary."""
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
    """A whole UTF-8 file, line ends unchanged. Raises FileNotFoundError; ValueError if it is not
    UTF-8, or too large for a vocabulary."""
    try:
        return read_vocabulary_file(path, flag).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path} is not UTF-8 text: {error}") from None


def write_text(path: Path, text: str | bytes) -> None:
    """Replaces a UTF-8 file, or one of bytes, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode() if isinstance(text, str) else text)


def write_pretrained(directory: str | Path, encoding: Any, **settings: Any) -> None:
    """Writes tokenizer.json, of a `tokenizers.Tokenizer`, and tokenizer_config.json."""
    write_text(Path(directory, "tokenizer.json"), encoding.to_str(pretty=True))
    text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
    write_text(Path(directory, "tokenizer_config.json"), text)
