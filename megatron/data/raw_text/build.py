"""From flags to documents of raw text."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import TokenizerConfig
from megatron.config.raw_text import RawTextConfig
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import idx_path
from megatron.data.preprocessing.sentences import available_splitter
from megatron.data.raw_text.documents import RawTextDocuments
from megatron.data.raw_text.encode import TextEncoder, TextSettings
from megatron.data.raw_text.files import is_text_file_name
from megatron.data.raw_text.records import text_records
from megatron.data.raw_text.scan import batches


def is_raw_text(path: str, config: RawTextConfig) -> bool:
    """Whether a data path names text files and not the prefix of a .bin and an .idx."""
    return not idx_path(path).is_file() and (config.lazy_loader or is_text_file_name(path))


def text_settings(
    config: RawTextConfig, tokenizer: TokenizerConfig, sentences: bool = False
) -> TextSettings:
    """How texts become sequences.

    Args:
        sentences: make each sentence a sequence, for BERT and T5: the lines of a text with
            --presplit-sentences, else what NLTK's punkt finds, or rules where its data is not at
            hand. There is no end-of-document token then.
    """
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
    """The documents of one data path.

    Args:
        encoder: made of `text_settings`; one for all paths, so that its tokenizer is loaded once.

    Raises:
        FileNotFoundError, ValueError: as `RawTextDocuments.open`.
    """
    return RawTextDocuments.open(
        path, encoder, text_key=config.text_key, delim=_delim(config), cache=cache
    )


def read_texts(path: str, config: RawTextConfig) -> Iterator[str]:
    """The texts of one data path as they stand in the files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a record is malformed; names file and line.
    """
    for records in text_records(path, config.text_key, _delim(config)):
        for span in records.ranges():
            for batch in batches(records, span):
                yield from (text for _, text in batch)


def _delim(config: RawTextConfig) -> str | None:
    return "\t" if config.delim == r"\t" else config.delim  # as shells pass it on
