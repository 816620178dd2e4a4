"""Read the texts of evaluation files: JSON lines, whole files, and word-level corpora, which are
detokenized to ordinary text.

The detokenization rules and their order are those of Megatron-LM, because they affect published
perplexities.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from megatron.config import ConfigError
from megatron.features.raw_text.text_files import TextRecords, batches, located, text_records
from megatron.tokenizer import Tokenizer


class Record(NamedTuple):
    """Text in an evaluation file, with its position there."""

    text: str
    records: TextRecords
    offset: int

    @property
    def place(self) -> str:
        """File and line of the text, for error messages."""
        return located(self.records, self.offset)

    def tokens(self, tokenizer: Tokenizer, part: str | None = None) -> list[int]:
        """Return the token ids of the text, with the special tokens that the tokenizer adds, or
        those of ``part`` without them. Raises ValueError, naming the line, if the text cannot be
        tokenized."""
        try:
            if part is None:
                return tokenizer.tokenize(self.text)
            return tokenizer.tokenize_sentences([part])[0].tolist()
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from None


def records_of(path: str, key: str, delim: str | None = None) -> Iterator[Record]:
    """Yield the texts under ``key`` in the JSON lines of a file, skipping blank lines. A folder or
    glob is read file by file. Raises FileNotFoundError if no file matches, ConfigError if there is
    no text, and ValueError, with the line, if a line is not a JSON object with a string under
    ``key``."""
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


def read_text(path: str) -> str:
    """Read a UTF-8 file without changing its line breaks. Raises OSError if the file cannot be
    read, and ConfigError if it is empty or, with the line, if it is not UTF-8."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        raise ConfigError(
            f"--valid-data {path}, line {line}: not UTF-8 ({error}); convert the file"
        ) from None
    if not text.strip():
        raise ConfigError(f"--valid-data {path} is empty: name a file with text")
    return text


Rule = tuple[str, str] | Callable[[str], str]
"""Pair of a string and its replacement, or a function of the whole text."""

_DEGREE = "\N{DEGREE SIGN}"

_PTB: Sequence[Rule] = (
    (" '", "'"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" n't", "n't"),
    (" N ", "1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
)


def _pair(start: str, end: str) -> Rule:
    """Return a rule that removes white space just inside a pair of brackets or quotation marks."""
    inside = re.compile(f"{re.escape(start)}([^{re.escape(end)}]*){re.escape(end)}")
    return partial(_tightened, inside, start, end)


def _tightened(inside: re.Pattern[str], start: str, end: str, text: str) -> str:
    # Skip the text after the last closing mark: nothing matches there, and searching on from each
    # opening mark would take quadratic time.
    last = text.rfind(end) + 1
    pairs = inside.sub(lambda found: start + found[1].strip() + end, text[:last])
    return pairs + text[last:]


# Megatron-LM has one more rule, for the year in "the summer of ' 69". Its pattern contains slashes
# and never matches in prose.
_WIKITEXT: Sequence[Rule] = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    *(_pair(*ends) for ends in ("()", "[]", "{}", '""', "''")),
    *(("= " * level + "=", "=" * (level + 1)) for level in (3, 2, 1)),
    (f" {_DEGREE} ", _DEGREE),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)

_RULES: dict[str, Sequence[Rule]] = {"ptb": _PTB, "wiki": _WIKITEXT, "lambada": ()}
"""Detokenization rules, by the word in a file's path that selects them. The first match wins."""


def detokenizer_of(path: str) -> tuple[str | None, Callable[[str], str]]:
    """Return the name of a file's detokenizer, or None, and the function that applies it. It is the
    first of ptb, wiki and lambada that occurs in the path, case-sensitively. Without one, the
    function returns the text unchanged."""
    name = next((word for word in _RULES if word in path), None)

    def detokenized(text: str) -> str:
        for rule in _RULES[name] if name else ():
            text = text.replace(*rule) if isinstance(rule, tuple) else rule(text)
        return text

    return name, detokenized
