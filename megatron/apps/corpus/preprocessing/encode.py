"""A block of records to token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.apps.corpus.preprocessing.inputs import Form
from megatron.apps.corpus.preprocessing.readers import (
    FileRange,
    Record,
    RecordBlock,
    too_long,
)
from megatron.data.json_lines import BadLine, read_lines, texts_of_line
from megatron.data.text_encoder import TextEncoder, TextSettings, refused
from megatron.tokenizer.mark import mark_of

_RANGE_BUFFER_BYTES = 1 << 17


@dataclass(frozen=True)
class EncodeConfig:
    """Everything that decides which tokens a record becomes."""

    text: TextSettings
    keys: tuple[str, ...]
    stop_at_bad_line: bool
    max_line_bytes: int


@dataclass(frozen=True)
class EncodedTexts:
    tokens: npt.NDArray[np.integer]
    """All documents back to back."""
    sequence_lengths: npt.NDArray[np.int32]
    sequences_per_document: npt.NDArray[np.int32]
    text_bytes: int
    """UTF-8 bytes of the texts."""
    empty: int
    """Texts without a token; they make no document."""


@dataclass(frozen=True)
class EncodedBlock:
    texts: list[EncodedTexts]
    """One for each key."""
    bad_lines: list[BadLine]
    """With their numbers in the file; of a range of bytes, in the range."""
    lines: int
    """Of a range of bytes; else 0."""


class BlockEncoder:
    """Encodes blocks; the same records give the same tokens in every process and block."""

    def __init__(self, config: EncodeConfig) -> None:
        """Raises what `build_tokenizer`, `TextEncoder.eod` and `build_splitter` raise."""
        self.config = config
        self._encode = TextEncoder(config.text)
        self.dtype = self._encode.dtype
        mark = mark_of(self._encode.tokenizer, config.text.tokenizer.tokenizer_type)
        self.mark = None if mark is None else mark.json()
        assert self._encode.eod is None or self._encode.eod.size == 1
        assert self._encode.split is None or config.text.splitter

    def __call__(self, block: RecordBlock) -> EncodedBlock:
        """Raises OSError where a range cannot be read."""
        numbers: list[int] = []
        columns: list[list[str]] = [[] for _ in self.config.keys]
        bad: list[BadLine] = []
        lines = 0
        for number, content in self._records(block):
            lines = number
            found = self._texts(number, content, block.file.form)
            if isinstance(found, list):
                numbers.append(number)
                for column, text in zip(columns, found, strict=True):
                    column.append(text)
            elif found is not None:
                bad.append(found)
                if self.config.stop_at_bad_line:
                    break
        try:
            texts = [self._encoded(column) for column in columns]
        except ValueError:  # a text cannot be tokenized: find out which
            refusals: dict[int, BadLine] = {}
            for column in columns:
                for place, error in refused(self._encode, column):
                    line = BadLine(numbers[place], "a text that cannot be tokenized", str(error))
                    refusals.setdefault(place, line)
            bad = sorted([*bad, *refusals.values()], key=lambda line: line.number)
            texts = [
                self._encoded([t for place, t in enumerate(column) if place not in refusals])
                for column in columns
            ]
        return EncodedBlock(texts, bad, lines if isinstance(block.records, FileRange) else 0)

    def _records(self, block: RecordBlock) -> Iterator[Record]:
        """Those of the block; the lines of a range are numbered within it."""
        if not isinstance(block.records, FileRange):
            yield from block.records
            return
        span, longest = block.records, self.config.max_line_bytes
        assert block.file.path is not None
        with block.file.path.open("rb", _RANGE_BUFFER_BYTES) as file:
            lines = read_lines(file, longest, span.start, span.stop)
            for number, (_, line) in enumerate(lines, 1):
                yield number, line if len(line) <= longest else too_long(number, longest)

    def _texts(
        self, number: int, content: bytes | list[str | None] | BadLine, form: Form
    ) -> list[str] | BadLine | None:
        if isinstance(content, BadLine):
            return content
        if isinstance(content, list):
            texts = []
            for key, text in zip(self.config.keys, content, strict=True):
                if text is None:
                    return BadLine(number, f'"{key}" is not a string', "found null")
                if len(text) > self.config.max_line_bytes:
                    return too_long(number, self.config.max_line_bytes)
                texts.append(text)
            return texts
        if form in (Form.TEXT, Form.PARAGRAPHS):
            try:
                return [content.decode()]
            except UnicodeDecodeError as error:
                line = number + content.count(b"\n", 0, error.start)
                return BadLine(line, "not UTF-8", str(error))
        if not content or content.isspace():
            return None
        return texts_of_line(content, number, self.config.keys)

    def _encoded(self, texts: Sequence[str]) -> EncodedTexts:
        documents = [document for document in self._encode(texts) if document]
        sequences = [sequence for document in documents for sequence in document]
        flat = np.concatenate(sequences) if sequences else np.empty(0, np.int32)
        return EncodedTexts(
            tokens=flat.astype(self.dtype),
            sequence_lengths=np.fromiter(map(len, sequences), "<i4", len(sequences)),
            sequences_per_document=np.fromiter(map(len, documents), "<i4", len(documents)),
            text_bytes=sum(len(t) if t.isascii() else len(t.encode()) for t in texts),
            empty=len(texts) - len(documents),
        )
