"""The records of a JSON-lines file, each with the line it is in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.config import ConfigError
from megatron.features.raw_text.scan import batches, located
from megatron.features.raw_text.text_files import TextRecords, text_records
from megatron.tokenizer import Tokenizer


class Record(NamedTuple):
    """A text, and its place."""

    text: str
    records: TextRecords
    offset: int

    @property
    def place(self) -> str:
        """File and line, for a message."""
        return located(self.records, self.offset)

    def tokens(self, tokenizer: Tokenizer, text: str | None = None) -> list[int]:
        """The ids of the text, or of a part of it without what the tokenizer puts around a whole
        text. Raises ValueError, which names the line, if it cannot be tokenized."""
        try:
            if text is None:
                return tokenizer.tokenize(self.text)
            return tokenizer.tokenize_sentences([text])[0].tolist()
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from None


def records_of(path: str, key: str, delim: str | None = None) -> Iterator[Record]:
    """The texts under a key in the lines of a file, blank lines left out; of a folder or glob, one
    after the other. Raises FileNotFoundError; ConfigError if no line has a text; ValueError, which
    names the line, if one is not a JSON object with a string under the key."""
    empty = True
    for records in text_records(path, key, delim):
        for span in records.ranges():
            for batch in batches(records, span):
                for offset, text in batch:
                    empty = False
                    yield Record(text, records, offset)
    if empty:
        raise ConfigError(
            f"--valid-data {path} is empty: it must have a JSON object in each line, with the text "
            f'under "{key}"'
        )
