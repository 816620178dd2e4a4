"""Texts of evaluation files: records of JSON lines, whole files, and word-level corpora,
detokenized, so that a model reads ordinary text.

The rules of the detokenizers are from Megatron-LM, in its order, which affects published
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
    """A text, and its place."""

    text: str
    records: TextRecords
    offset: int

    @property
    def place(self) -> str:
        """File and line, for a message."""
        return located(self.records, self.offset)

    def tokens(self, tokenizer: Tokenizer, part: str | None = None) -> list[int]:
        """The ids of the text, or of a part of it without what the tokenizer puts around a whole
        text. Raises ValueError, which names the line, if it cannot be tokenized."""
        try:
            if part is None:
                return tokenizer.tokenize(self.text)
            return tokenizer.tokenize_sentences([part])[0].tolist()
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


def read_text(path: str) -> str:
    """A UTF-8 file, line breaks as they are. Raises OSError; ValueError, which names the byte, if
    it is not UTF-8, or it is empty."""
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
"""A text and its replacement, or a function of the whole text."""

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
    """No white space inside a pair of brackets or quotation marks."""
    inside = re.compile(f"{re.escape(start)}([^{re.escape(end)}]*){re.escape(end)}")
    return partial(_tightened, inside, start, end)


def _tightened(inside: re.Pattern[str], start: str, end: str, text: str) -> str:
    # After the last end nothing matches, and each start would search all of the rest for one.
    last = text.rfind(end) + 1
    pairs = inside.sub(lambda found: start + found[1].strip() + end, text[:last])
    return pairs + text[last:]


# Megatron-LM has one more rule, for the year in "the summer of ' 69"; its pattern contains slashes
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
"""By the word that a path contains; the first one counts."""


def detokenizer_of(path: str) -> tuple[str | None, Callable[[str], str]]:
    """The detokenizer of a file: its name, None without one, and the function. It is the first of
    ptb, wiki and lambada anywhere in the path as it was given; upper and lower case differ."""
    name = next((word for word in _RULES if word in path), None)

    def detokenized(text: str) -> str:
        for rule in _RULES[name] if name else ():
            text = text.replace(*rule) if isinstance(rule, tuple) else rule(text)
        return text

    return name, detokenized
