"""A block of records to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.config import TokenizerConfig
from megatron.corpus.preprocessing.blocks import Block
from megatron.corpus.preprocessing.extract import Extractor
from megatron.data.indexed import best_dtype
from megatron.data.json_lines import BadLine
from megatron.data.sentences import SentenceSplitter, build_splitter
from megatron.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class EncodeConfig:
    """All that decides which tokens a text becomes."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    splitter: str | None
    """"rules" or "punkt"; None: a document is one sequence."""
    lang: str
    keep_newlines: bool
    stop_at_bad_line: bool
    max_line_bytes: int


@dataclass(frozen=True)
class DocumentCounts:
    """All about the documents of one key of a block but their tokens."""

    tokens: int
    sequence_lengths: npt.NDArray[np.int32]
    sequences_per_document: npt.NDArray[np.int32]
    text_bytes: int
    """UTF-8 bytes of the texts."""
    empty: int
    """Texts without a token; they make no document."""


@dataclass(frozen=True)
class BlockCounts:
    """What became of a block; small beside its tokens."""

    documents: list[DocumentCounts]
    """One for each key."""
    bad_lines: list[BadLine]
    """Numbered from 1 within the block."""
    records: int
    """How far the numbering of the source goes on."""


@dataclass(frozen=True)
class EncodedBlock:
    """The tokens of a block."""

    tokens: list[npt.NDArray[np.integer]]
    """All documents of a key back to back, for each key."""
    counts: BlockCounts


class Encoder:
    """Encodes blocks; the same records give the same tokens in every process and block."""

    def __init__(self, config: EncodeConfig) -> None:
        """Raises what `build_tokenizer`, `Tokenizer.eod` and `build_splitter` raise."""
        self.config = config
        self._tokenizer: Tokenizer = build_tokenizer(config.tokenizer)
        self.dtype = best_dtype(self._tokenizer.vocab_size)
        self._eod: npt.NDArray[np.int32] | None = None
        if config.append_eod:
            try:
                self._eod = np.array([self._tokenizer.eod], np.int32)
            except ValueError as error:
                raise ValueError(f"--append-eod: {error}") from error
        self._extract = Extractor(config.keys, config.max_line_bytes, config.stop_at_bad_line)
        self._split: SentenceSplitter | None = None
        if config.splitter is not None:
            self._split = build_splitter(config.splitter, config.lang, config.keep_newlines)

    def __call__(self, block: Block) -> EncodedBlock:
        texts = self._extract(block)
        bad = texts.bad
        try:
            encoded = [self._documents(column) for column in texts.columns]
        except ValueError:  # some text cannot be tokenized: find out which
            usable, refused = self._sifted(texts.numbers, texts.columns)
            encoded = [self._documents(column) for column in usable]
            bad = sorted(bad + refused, key=lambda line: line.number)
        tokens = [tokens for tokens, _ in encoded]
        return EncodedBlock(tokens, BlockCounts([c for _, c in encoded], bad, texts.records))

    def _documents(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.integer], DocumentCounts]:
        if self._split is None:
            sentences, counts = texts, [1] * len(texts)
        else:
            split = [self._split(text) for text in texts]
            sentences, counts = [s for of_text in split for s in of_text], list(map(len, split))
        ids = self._tokenizer.tokenize_batch(sentences)
        sequences: list[npt.NDArray[np.int32]] = []
        per_document: list[int] = []
        start = 0
        for count in counts:
            document = [sequence for sequence in ids[start : start + count] if len(sequence)]
            start += count
            if document:
                if self._eod is not None:
                    document[-1] = np.concatenate((document[-1], self._eod))
                sequences += document
                per_document.append(len(document))
        flat = np.concatenate(sequences) if sequences else np.empty(0, np.int32)
        return flat.astype(self.dtype), DocumentCounts(
            tokens=len(flat),
            sequence_lengths=np.fromiter(map(len, sequences), np.int32, len(sequences)),
            sequences_per_document=np.array(per_document, np.int32),
            text_bytes=sum(len(t) if t.isascii() else len(t.encode()) for t in texts),
            empty=len(texts) - len(per_document),
        )

    def _sifted(
        self, numbers: Sequence[int], columns: Sequence[Sequence[str]]
    ) -> tuple[Iterable[list[str]], list[BadLine]]:
        usable: list[list[str]] = [[] for _ in columns]
        bad = []
        for number, *texts in zip(numbers, *columns, strict=True):
            try:
                for text in texts:
                    self._documents([text])
            except ValueError as error:
                bad.append(BadLine(number, "a text that cannot be tokenized", str(error)))
            else:
                for column, text in zip(usable, texts, strict=True):
                    column.append(text)
        return usable, bad
