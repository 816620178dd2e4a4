"""Unicode normalisation in linear time."""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Literal

LONGEST_RUN = 128
"""Longest run of combining marks to normalise. Unicode's Stream-Safe Format allows 30."""


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Return a text in a Unicode normal form. Runs of marks longer than `LONGEST_RUN`, which
    occur in no language, are left unchanged, because Python sorts a character's marks in
    quadratic time."""
    if text.isascii():
        return text
    pieces, done = [], 0
    for run in _long_runs().finditer(text):
        pieces += [unicodedata.normalize(form, text[done : run.start()]), run[0]]
        done = run.end()
    return "".join([*pieces, unicodedata.normalize(form, text[done:])])


@functools.cache
def _long_runs() -> re.Pattern[str]:
    """Return a pattern for long runs of characters whose NFKD form starts with a combining mark."""
    marks = [
        character
        for character in map(chr, range(0x300, 0x20000))  # this range contains all combining marks
        if unicodedata.combining(unicodedata.normalize("NFKD", character)[0])
    ]
    return re.compile(f"[{''.join(marks)}]{{{LONGEST_RUN + 1},}}")
