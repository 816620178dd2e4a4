"""The mark of the tokenizer that made token ids: a small JSON file next to them, by which other
programs see whether theirs gives the same ids."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.tokenizer.base import Tokenizer
from megatron.util.digests import digest
from megatron.util.json_text import parse_json

_FORMAT = 1
_TEXTS = (
    "The quick brown fox jumps over the lazy dog; it's a pity that he'll never know why.",
    "Representation, tokenization, unbelievably, internationalisation, antidisestablishment",
    "In 1984 there were 3 7 59 and 20240101 of them: 3.14159, 1,000,000, 50 %, $5.99 (half).",
    "def load(path: str, *, deep=False) -> dict[str, int]:\n\treturn {k: v for k, v in x.items()}",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 1 << 4); return 0; }  // C',
    "<p class='a'>HTML</p> https://example.org/path?q=1&r=two user@example.com\n\n\n    four",
    "El niño comió mañana; über Straße, naïve façade, Łódź; Быстрая лиса. Η αλεπού.",
    "東京は日本の首都です。 你好，世界 한국어 اللغة עברית हिन्दी 😀",
)
"""Texts of many kinds, whose ids tell tokenizers apart. A change of them makes all marks void."""


@dataclass(frozen=True)
class TokenizerMark:
    """Attributes:
    tokenizer_type: as --tokenizer-type names it.
    digest: of the ids of some texts, wherever its files are, and whichever type reads them.
    """

    tokenizer_type: str
    vocab_size: int
    digest: str

    def __str__(self) -> str:
        return f"{self.tokenizer_type} of {self.vocab_size:,} ids ({self.digest[:8]})"

    def json(self) -> bytes:
        """The content of a file."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n").encode()


@functools.lru_cache(maxsize=4)
def mark_of(tokenizer: Tokenizer, tokenizer_type: str | None) -> TokenizerMark | None:
    """The mark of a tokenizer; None if its texts are numbers, which stand for the ids of one that
    is not known. Takes milliseconds."""
    name, ids = tokenizer_type or type(tokenizer).__name__, tokenizer.special_ids
    if not tokenizer.writes_text:
        return None
    try:
        samples = tokenizer.sample_ids(_TEXTS)
    except ValueError:
        return None  # it has no token for some characters
    around = [i for i in (ids.bos, ids.eos) if i is not None]  # whichever a type puts there
    bare = [each[~np.isin(each, around)].tolist() for each in samples]
    return TokenizerMark(name, tokenizer.vocab_size, digest(json.dumps(bare)))


def parsed_mark(content: bytes) -> TokenizerMark | None:
    """The mark that a file contains; None if a later version wrote it. Raises ValueError if it is
    malformed."""
    fields: Any = parse_json(content, "it")
    try:
        if fields.pop("format") != _FORMAT:
            return None
        mark = TokenizerMark(**fields)
    except (AttributeError, KeyError, TypeError):
        mark = TokenizerMark("", 0, "")
    texts = (mark.tokenizer_type, mark.digest)
    named = all(isinstance(each, str) and each.isprintable() for each in texts)  # it is shown
    if not (named and mark.digest and type(mark.vocab_size) is int):
        raise ValueError("it is not the mark of a tokenizer: remove it")
    return mark


def common_mark(marks: Mapping[str, TokenizerMark | None]) -> TokenizerMark | None:
    """The mark of data that are put together, by what they are; None if one of them is not known.
    Raises ValueError if they are of different tokenizers."""
    known = {name: mark for name, mark in marks.items() if mark is not None}
    first = next(iter(known.items()), None)
    for name, mark in known.items():
        if first is not None and mark.digest != first[1].digest:
            raise ValueError(
                f"{first[0]} was made with {first[1]}, and {name} with {mark}: data of different "
                "tokenizers cannot be put together; preprocess them with the same one"
            )
    return first[1] if first is not None and len(known) == len(marks) else None
