"""Flags for raw text: JSON, CSV or TSV files that are tokenized during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.features import KindConfig
from megatron.config.flags import option

TEXT_ENDINGS = (".json", ".jsonl", ".csv", ".tsv")
PACKED_ENDINGS = (".gz", ".zst", ".bz2", ".xz", ".zip", ".parquet")


@dataclass(frozen=True)
class RawTextConfig(KindConfig):
    """Raw text: documents that are read from text files and tokenized during training."""

    lazy_loader: bool = option(False)
    """Treat the data paths as text files (JSON lines, .csv, .tsv), or folders or globs of such
    files, instead of prefixes of indexed datasets. Not needed for paths that end in .json, .jsonl,
    .csv or .tsv."""
    text_key: str = option("text")
    """JSON key or table column that contains the text."""
    eval_text_key: str | None = option(None, derived="--text-key")
    """JSON key or table column that contains the text in the files of --valid-data-path and
    --test-data-path."""
    presplit_sentences: bool = option(False)
    """Texts have one sentence per line. Each sentence becomes a sequence (BERT, T5)."""
    delim: str | None = option(None, derived="a comma in .csv, a tab in .tsv")
    """Character that separates the columns of .csv and .tsv files."""
    append_eod: bool = option(True, flag="--append-eod", off="--no-append-eod")
    """Append the end-of-document token to each document of raw text, as preprocess_data.py
    --append-eod does. Sentences for BERT and T5 never have it."""

    files: ClassVar[str | None] = "text"
    idle: ClassVar[str] = "this run has no raw text"

    @property
    def endings(self) -> tuple[str, ...]:
        """File name endings of raw text. They include those of compressed files, for which the
        reader raises an error that explains what to do."""
        if self.lazy_loader:
            return ("",)
        packed = ("", *PACKED_ENDINGS[:-1])
        return tuple(ending + end for ending in TEXT_ENDINGS for end in packed)
