"""Documents read from text files and tokenized when needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache

from megatron.config import RunConfig, TokenizerConfig
from megatron.data.build import SourceReader
from megatron.data.index_cache import IndexCache
from megatron.data.pipeline import DataKind, DataPipeline
from megatron.data.sources import DataSource
from megatron.data.text_encoder import TextEncoder, TextSettings, available_splitter
from megatron.features.raw_text.documents import RawTextDocuments
from megatron.features.raw_text.flags import RawTextConfig
from megatron.features.raw_text.scan import batches
from megatron.features.raw_text.text_files import text_records


class RawText(DataKind):
    """Text files instead of .bin/.idx."""

    def reader(self, data: DataPipeline) -> SourceReader:
        def open_text(path: str, source: DataSource) -> RawTextDocuments:
            config = with_key_of(source, data.config.section(RawTextConfig))
            return open_raw_text(path, config, text_encoder(data), data.cache(path))

        return SourceReader(open_text, data.recipe())

    def texts(self, config: RunConfig, sources: Sequence[DataSource]) -> Iterator[str]:
        for source in sources:
            for path in source.paths:
                yield from read_texts(path, with_key_of(source, config.section(RawTextConfig)))


KIND = RawText()


@lru_cache(maxsize=1)
def text_encoder(data: DataPipeline) -> TextEncoder:
    """Encodes a run's raw text, sentence by sentence where its samples need it. One for all files
    and kinds, so that its tokenizer is loaded once."""
    config = data.config
    settings = text_settings(
        config.section(RawTextConfig), config.tokenizer, data.unit == "sentence"
    )
    return TextEncoder(settings, data.tokenizer)


def with_key_of(source: DataSource, config: RawTextConfig) -> RawTextConfig:
    """The configuration with the source's own key, if it names one."""
    return dataclasses.replace(config, text_key=source.text_key or config.text_key)


def text_settings(
    config: RawTextConfig, tokenizer: TokenizerConfig, sentences: bool = False
) -> TextSettings:
    """How texts become sequences. `sentences` makes each sentence a sequence, for BERT and T5,
    without an end-of-document token: the lines of a text with --presplit-sentences, else what
    NLTK's punkt finds, or rules where its data is not installed."""
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
    """The documents of one data path; `encoder` has the settings of `text_settings`. Errors: see
    `RawTextDocuments.open`."""
    return RawTextDocuments.open(
        path, encoder, text_key=config.text_key, delim=_delim(config), cache=cache
    )


def read_texts(path: str, config: RawTextConfig) -> Iterator[str]:
    """The texts of one data path, as they are in the files. Raises FileNotFoundError; ValueError if
    a record is malformed."""
    for records in text_records(path, config.text_key, _delim(config)):
        for span in records.ranges():
            for batch in batches(records, span):
                yield from (text for _, text in batch)


def _delim(config: RawTextConfig) -> str | None:
    return "\t" if config.delim == r"\t" else config.delim  # as shells pass it on
