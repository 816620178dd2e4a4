"""Unicode normalisation in linear time."""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Literal

LONGEST_RUN = 128
"""Combining marks in a row that are normalised; Unicode's Stream-Safe Text Format has 30."""


def normalized(form: Literal["NFC", "NFKC"], text: str) -> str:
    """The text in a normal form. Python sorts a character's marks in quadratic time, so runs longer
    than `LONGEST_RUN`, which no language has, are left unchanged."""
    if text.isascii():
        return text
    pieces, done = [], 0
    for run in _long_runs().finditer(text):
        pieces += [unicodedata.normalize(form, text[done : run.start()]), run[0]]
        done = run.end()
    return "".join([*pieces, unicodedata.normalize(form, text[done:])])


@functools.cache
def _long_runs() -> re.Pattern[str]:
    """Runs of characters that are combining marks, or begin with one when they are decomposed."""
    marks = [
        character
        for character in map(chr, range(0x300, 0x20000))  # all marks are below
        if unicodedata.combining(unicodedata.normalize("NFKD", character)[0])
    ]
    return re.compile(f"[{''.join(marks)}]{{{LONGEST_RUN + 1},}}")
