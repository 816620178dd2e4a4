"""One text to the sequences of its document, by the rules of tools/preprocess_data.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import TokenizerConfig
from megatron.data.indexed import best_dtype
from megatron.data.sentences import SentenceSplitter, build_splitter
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.util.digests import digest_of_parts


@dataclass(frozen=True)
class TextSettings:
    """All that decides which tokens a text becomes."""

    tokenizer: TokenizerConfig
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    presplit_sentences: bool = False
    """A text holds one sentence a line."""
    splitter: str | None = None
    """What finds sentences otherwise ("rules" or "punkt"); None: a document is one sequence."""
    lang: str = "english"
    keep_newlines: bool = False


class TextEncoder:
    """Encodes texts; loads its tokenizer when it is first needed, once in every process.

    Pickles as its settings.
    """

    def __init__(self, settings: TextSettings, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` is that of the settings, where it is at hand."""
        self.settings = settings
        if tokenizer is not None:
            self.tokenizer = tokenizer

    def __reduce__(self) -> tuple[type[TextEncoder], tuple[TextSettings]]:
        return type(self), (self.settings,)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValueError, FileNotFoundError: as `build_tokenizer`.
        """
        return build_tokenizer(self.settings.tokenizer)

    @cached_property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return best_dtype(self.tokenizer.vocab_size)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """All that the tokens of a text depend on, as JSON values; files by their content."""
        values = dataclasses.asdict(self.settings)
        values["tokenizer"] = tokenizer_identity(self.settings.tokenizer)
        return values

    def __call__(self, texts: Sequence[str]) -> list[list[npt.NDArray[np.integer]]]:
        """The sequences of each text's document; none for a text without a token.

        Raises:
            ValueError: a text cannot be tokenized, or there is no end-of-document token.
        """
        sentences = [self._sentences(text) for text in texts]
        ids = iter(self.tokenizer.tokenize_batch([s for of_text in sentences for s in of_text]))
        documents = []
        for of_text in sentences:
            tokens = (next(ids) for _ in of_text)
            document = [sequence.astype(self.dtype) for sequence in tokens if len(sequence)]
            if document and self._eod is not None:
                document[-1] = np.append(document[-1], self._eod)
            documents.append(document)
        return documents

    def _sentences(self, text: str) -> list[str]:
        if self.settings.presplit_sentences:
            return [line for line in text.split("\n") if line and not line.isspace()]
        return [text] if self._split is None else self._split(text)

    @cached_property
    def _split(self) -> SentenceSplitter | None:
        kind = self.settings.splitter
        if kind is None:
            return None
        return build_splitter(kind, self.settings.lang, self.settings.keep_newlines)

    @cached_property
    def _eod(self) -> npt.NDArray[np.integer] | None:
        if not self.settings.append_eod:
            return None
        try:
            return np.array([self.tokenizer.eod], self.dtype)
        except ValueError as error:
            raise ValueError(f"--append-eod: {error}; or give --no-append-eod") from error


def tokenizer_identity(config: TokenizerConfig) -> dict[str, Any]:
    """The settings of a tokenizer as JSON values, with a digest of the content in place of the
    path of each of its files and folders."""
    return {
        name: _with_content(value) if isinstance(value, str) else value
        for name, value in dataclasses.asdict(config).items()
    }


def _with_content(text: str) -> str:
    """The digest of the file or folder that a text names, or else the text."""
    try:
        exists = Path(text).exists()
    except OSError:  # too long for a path, for example
        exists = False
    return digest_of_parts(_contents(Path(text))) if exists else text


def _contents(path: Path) -> Iterator[bytes]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        content = file.read_bytes()
        name = "" if file == path else str(file.relative_to(path))
        yield f"{name}\0{len(content)}\0".encode() + content
