"""Where a text shares n-grams of words with others, and what is left when they are cut out.

The rule of GPT-3 (Brown et al. 2020, appendix C) in the form of Megatron's script: texts that
share a run of 13 words with an evaluation set lose it together with 200 characters on both sides,
up to the ends of the sentences there; pieces under 200 characters go, and documents cut in more
than 10 places go whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"[.!?]")
Span = tuple[int, int]


@dataclass(frozen=True)
class CutRule:
    """How a document is cut."""

    margin: int
    """Characters that go on both sides of an n-gram."""
    min_characters: int
    """Shorter pieces go."""
    max_cuts: int
    """Documents cut in more places go."""


def words_of(text: str) -> list[tuple[str, int, int]]:
    """Words in small letters, with start and end in the text."""
    return [(match[0].lower(), match.start(), match.end()) for match in _WORD.finditer(text)]


def ngrams_of_task(text: str, shortest: int, longest: int) -> Iterator[str]:
    """The n-grams of an evaluation text: all runs of `longest` words, joined by spaces.

    A text of fewer words, but `shortest` at least, is one n-gram; a shorter one has none.
    """
    words = [word for word, _, _ in words_of(text)]
    if shortest <= len(words) < longest:
        yield " ".join(words)
    for i in range(len(words) - longest + 1):
        yield " ".join(words[i : i + longest])


class Matcher:
    """Finds the n-grams of a set in texts."""

    def __init__(self, ngrams: Iterable[str]) -> None:
        """n-grams of two words or more, in small letters, joined by single spaces."""
        self._ngrams: frozenset[str] = frozenset(ngrams)
        lengths: dict[tuple[str, str], set[int]] = {}
        for ngram in self._ngrams:
            words = ngram.split(" ")
            assert len(words) > 1
            lengths.setdefault((words[0], words[1]), set()).add(len(words))
        # Few places of a text begin with two words that an n-gram begins with.
        self._lengths = {pair: sorted(found) for pair, found in lengths.items()}

    def __call__(self, text: str) -> list[tuple[str, Span]]:
        """Each n-gram found and the characters it covers, in the order of their start."""
        located = words_of(text)
        words = [word for word, _, _ in located]
        found = []
        for i, pair in enumerate(zip(words, words[1:], strict=False)):
            for length in self._lengths.get(pair, ()):
                ngram = " ".join(words[i : i + length])
                if i + length <= len(words) and ngram in self._ngrams:
                    found.append((ngram, (located[i][1], located[i + length - 1][2])))
        return found


def cuts(text: str, spans: Iterable[Span], margin: int) -> list[Span]:
    """What is to go from a text, as spans that neither meet nor overlap, in order.

    From `margin` characters before an n-gram back to the end of the sentence before; behind it
    likewise on to the end of the sentence.
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        start, end = _start_of_cut(text, start - margin), _end_of_cut(text, end + margin)
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def pieces(text: str, removed: Iterable[Span], min_characters: int) -> list[str]:
    """What stays of a text: the pieces between the cuts, without white space around them."""
    found = []
    position = 0
    for start, end in (*removed, (len(text), len(text))):
        piece = text[position:start].strip()
        if len(piece) >= max(min_characters, 1):
            found.append(piece)
        position = end
    return found


def _start_of_cut(text: str, position: int) -> int:
    before = max(position, 0)
    while before > 0 and not _SENTENCE_END.match(text, before - 1):
        before -= 1
    return before


def _end_of_cut(text: str, position: int) -> int:
    match = _SENTENCE_END.search(text, min(position, len(text)))
    return match.end() if match else len(text)
