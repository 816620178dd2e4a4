"""Fingerprint of the tokenizer that produced token ids, stored in a small JSON file next to the
data. Other programs use it to check that their tokenizer gives the same ids."""

from __future__ import annotations

import functools
import json
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
"""Varied texts whose ids distinguish tokenizers. Changing any of them invalidates all marks."""


@dataclass(frozen=True)
class TokenizerMark:
    """Fingerprint of a tokenizer. ``tokenizer_type`` is the value of --tokenizer-type. ``digest``
    is a hash of the ids of sample texts, which do not depend on the type or the files' location.
    """

    tokenizer_type: str
    vocab_size: int
    digest: str

    def __str__(self) -> str:
        return f"{self.tokenizer_type} of {self.vocab_size:,} ids ({self.digest[:8]})"

    def json(self) -> bytes:
        """Return the mark as the content of its JSON file."""
        return (json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n").encode()


@functools.lru_cache(maxsize=4)
def mark_of(tokenizer: Tokenizer, tokenizer_type: str | None) -> TokenizerMark | None:
    """Return a tokenizer's mark. Return None if the tokenizer only parses ids written as numbers,
    or cannot encode some of the sample texts. Takes milliseconds."""
    name, ids = tokenizer_type or type(tokenizer).__name__, tokenizer.special_ids
    if not tokenizer.writes_text:
        return None
    try:
        samples = tokenizer.sample_ids(_TEXTS)
    except ValueError:
        return None  # some characters have no token
    around = [i for i in (ids.bos, ids.eos) if i is not None]
    bare = [each[~np.isin(each, around)].tolist() for each in samples]
    return TokenizerMark(name, tokenizer.vocab_size, digest(json.dumps(bare)))


def parsed_mark(content: bytes) -> TokenizerMark | None:
    """Parse the content of a mark's file. Return None if a later version wrote it. Raises
    ValueError if it is malformed."""
    fields: Any = parse_json(content, "it")
    try:
        if fields.pop("format") != _FORMAT:
            return None
        mark = TokenizerMark(**fields)
    except (AttributeError, KeyError, TypeError):
        mark = TokenizerMark("", 0, "")
    texts = (mark.tokenizer_type, mark.digest)
    named = all(isinstance(each, str) and each.isprintable() for each in texts)  # messages show it
    if not (named and mark.digest and type(mark.vocab_size) is int):
        raise ValueError("it is not the mark of a tokenizer: remove it")
    return mark
