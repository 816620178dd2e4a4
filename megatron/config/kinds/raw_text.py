"""Text that is tokenized while training, straight from its JSON, CSV or TSV files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.flags import option
from megatron.config.kinds import KindConfig

TEXT_ENDINGS = (".json", ".jsonl", ".csv", ".tsv")
PACKED_ENDINGS = (".gz", ".zst", ".bz2", ".xz", ".zip", ".parquet")


@dataclass(frozen=True)
class RawTextConfig(KindConfig):
    """Raw text: documents read from text files and tokenized when a sample needs them."""

    lazy_loader: bool = option(False)
    """The data paths name text files (JSON lines, .csv, .tsv), folders or globs of them, not
    prefixes of .bin/.idx. A path that ends in .json, .jsonl, .csv or .tsv is read so without this
    flag, too."""
    text_key: str = option("text")
    """Key or column of the text."""
    eval_text_key: str | None = option(None, derived="--text-key")
    """The same for validation and test data that have files of their own."""
    presplit_sentences: bool = option(False)
    """A text contains one sentence per line; each becomes its own sequence (BERT, T5)."""
    delim: str | None = option(None, derived="a comma in .csv, a tab in .tsv")
    """Character between the columns of .csv and .tsv files."""
    append_eod: bool = option(True, flag="--append-eod", off="--no-append-eod")
    """End each document of raw text with the end-of-document token, as preprocess_data.py
    --append-eod does; sentences for BERT and T5 have none."""

    files: ClassVar[str | None] = "text"
    holds_text: ClassVar[bool] = True
    idle: ClassVar[str] = "no data of this run is raw text"

    @property
    def endings(self) -> tuple[str, ...]:
        """See `KindConfig.endings`; packed text counts: its reader says what to do."""
        if self.lazy_loader:
            return ("",)
        packed = ("", *PACKED_ENDINGS[:-1])
        return tuple(ending + end for ending in TEXT_ENDINGS for end in packed)
