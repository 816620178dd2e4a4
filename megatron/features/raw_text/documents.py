"""Documents in text files. Record offsets and document lengths are indexed once; tokens are
computed when they are read."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import RunConfig, TokenizerConfig
from megatron.data.build import SourceReader
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.pipeline import DataKind, DataPipeline
from megatron.data.samples import checked_range
from megatron.data.sources import DataSource
from megatron.features.raw_text.encoder import TextEncoder, TextSettings, available_splitter
from megatron.features.raw_text.flags import RawTextConfig
from megatron.features.raw_text.text_files import (
    TextFile,
    TextRecords,
    batches,
    changed,
    say_what_changed,
    scan,
    text_records,
)
from megatron.util.digests import digest

# Index version, part of each cache key. Increment it whenever the arrays' meaning changes.
INDEX_VERSION = 1
_KEPT_TOKENS = 1 << 22


class RawTextDocuments:
    """Documents in text files, with the interface `Documents` of megatron/data/samples.py.

    Sequence i has the same tokens as sequence i of the .bin/.idx that tools/preprocess_data.py
    writes for the same files. The index is memory-mapped from its cache entry, and the text
    stays on disk. Recently read documents are kept in memory, up to 4 million tokens.

    After unpickling, as in loader workers, the files are opened and the tokenizer is loaded
    again.
    """

    def __init__(
        self, prefix: str, records: Sequence[TextRecords], encoder: TextEncoder, index: StoredArrays
    ) -> None:
        self.prefix = prefix
        self._records, self._encoder, self._index = list(records), encoder, index
        self.sequence_lengths: npt.NDArray[np.int32] = index["sequence_lengths"]
        self.document_indices: npt.NDArray[np.int64] = index["document_indices"]
        self._offsets = index["record_offsets"]
        self._bases = list(accumulate((r.file.size for r in records), initial=0))
        self._kept: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._kept_tokens = 0

    @classmethod
    def open(
        cls,
        path: str,
        encoder: TextEncoder,
        *,
        text_key: str = "text",
        delim: str | None = None,
        cache: IndexCache | None = None,
        workers: int | None = None,
    ) -> RawTextDocuments:
        """Index the documents of a file, folder or glob, or read the index from the cache, which by
        default is `index-cache/` next to the data. A `delim` of None means a comma in .csv and a
        tab in .tsv files. Raises FileNotFoundError if no file exists, and ValueError if a record is
        malformed or no document has a token."""
        records = text_records(path, text_key, delim)
        depends_on: dict[str, Any] = {
            "version": INDEX_VERSION,
            "files": [r.file.identity for r in records],
            "key": text_key,
            "delim": delim,
            "text": encoder.identity,
        }
        cache = cache or IndexCache.next_to(records[0].file.path, None)

        def arrays() -> dict[str, np.ndarray]:
            say_what_changed(cache.folder, depends_on, "raw-text")
            return scan(records, encoder, workers)

        documents = cls(path, records, encoder, cache.arrays("raw-text", depends_on, arrays))
        if not len(documents):
            raise ValueError(f"{path} contains no document with a token in it")
        return documents

    @cached_property
    def lengths_digest(self) -> str:
        return digest(self.sequence_lengths.tobytes())

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        """Return `length` tokens (default: all remaining ones) of sequence `index`, starting at
        token `offset`. Raises IndexError if the sequence does not exist or is shorter, and
        ValueError if a file has changed since it was indexed."""
        index, stop = checked_range(self.sequence_lengths, index, offset, length, self.prefix)
        document = int(np.searchsorted(self.document_indices, index, side="right")) - 1
        sequence = self._document(document)[index - int(self.document_indices[document])]
        return sequence[offset:stop]

    def verify(self) -> None:
        """Raise ValueError if a file has changed since it was indexed. The error names the file."""
        for records in self._records:
            if TextFile.of(records.file.path) != records.file:
                raise changed(records.file, 0)

    def text(self, document: int) -> str:
        records, start = self._place(document)
        stop = records.file.size
        if document + 1 < len(self._offsets):
            length = int(self._offsets[document + 1] - self._offsets[document])
            stop = min(stop, start + length)
        return records.text_at(start, stop)

    def _place(self, document: int) -> tuple[TextRecords, int]:
        start = int(self._offsets[document])
        number = bisect_right(self._bases, start) - 1
        return self._records[number], start - self._bases[number]

    def __getstate__(self) -> tuple[Any, ...]:
        return self.prefix, self._records, self._encoder, self._index

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]
        self.verify()

    def _document(self, number: int) -> list[np.ndarray]:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        (document,) = self._encoder([self.text(number)])
        sequences = [sequence.astype(self._encoder.dtype) for sequence in document]
        first, last = self.document_indices[number : number + 2].tolist()
        if list(map(len, sequences)) != self.sequence_lengths[first:last].tolist():
            records, start = self._place(number)
            raise changed(records.file, start)
        self._kept[number] = sequences
        self._kept_tokens += sum(map(len, sequences))
        while self._kept_tokens > _KEPT_TOKENS and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._kept_tokens -= sum(map(len, dropped))
        return sequences


class RawText(DataKind):
    """Data kind for text files instead of .bin/.idx."""

    def reader(self, data: DataPipeline) -> SourceReader:
        def open_text(path: str, source: DataSource) -> RawTextDocuments:
            config = with_key_of(source, data.config.section(RawTextConfig))
            return open_raw_text(path, config, text_encoder(data), data.cache(path))

        return SourceReader(open_text, data.recipe())


KIND = RawText()


def texts_of(config: RunConfig, sources: Sequence[DataSource]) -> Iterator[str]:
    """Return the texts of all files of the sources. Sources that are made by a program are made
    first."""
    for source in sources:
        source.make()
    flags = config.section(RawTextConfig)
    for source in sources:
        for path in source.paths:
            yield from read_texts(path, with_key_of(source, flags))


@lru_cache(maxsize=1)
def text_encoder(data: DataPipeline) -> TextEncoder:
    """Return the encoder for a run's raw text. It splits texts if samples consist of sentences. It
    is cached, so that all files and data kinds share one loaded tokenizer."""
    config = data.config
    settings = text_settings(
        config.section(RawTextConfig), config.tokenizer, data.unit == "sentence"
    )
    return TextEncoder(settings, data.tokenizer)


def with_key_of(source: DataSource, config: RawTextConfig) -> RawTextConfig:
    """Return the configuration with the source's own text key, if it has one."""
    return dataclasses.replace(config, text_key=source.text_key or config.text_key)


def text_settings(
    config: RawTextConfig, tokenizer: TokenizerConfig, sentences: bool = False
) -> TextSettings:
    """Return the settings that convert texts into sequences. With `sentences`, for BERT and T5,
    each sentence is a sequence and no end-of-document token is added. With --presplit-sentences,
    each line of a text is a sentence; otherwise NLTK's punkt finds sentences, or a set of rules if
    punkt's data is not installed."""
    split = sentences and not config.presplit_sentences
    return TextSettings(
        tokenizer,
        append_eod=config.append_eod and not sentences,
        presplit_sentences=config.presplit_sentences,
        splitter=available_splitter("english") if split else None,
    )


def open_raw_text(
    path: str, config: RawTextConfig, encoder: TextEncoder, cache: IndexCache
) -> RawTextDocuments:
    """Open the documents at a data path. `encoder` must have been created with the result of
    `text_settings`. Raises the errors of `RawTextDocuments.open`."""
    return RawTextDocuments.open(
        path, encoder, text_key=config.text_key, delim=_delim(config), cache=cache
    )


def read_texts(path: str, config: RawTextConfig) -> Iterator[str]:
    """Yield the untokenized texts at a data path. Raises FileNotFoundError if no file exists, and
    ValueError if a record is malformed."""
    for records in text_records(path, config.text_key, _delim(config)):
        for span in records.ranges():
            for batch in batches(records, span):
                yield from (text for _, text in batch)


def _delim(config: RawTextConfig) -> str | None:
    # a shell passes \t as a backslash and a t
    return "\t" if config.delim == r"\t" else config.delim
