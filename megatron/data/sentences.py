"""Splits text into sentences: NLTK's punkt where its data is installed, else a few rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from megatron.config import ConfigError

Span = tuple[int, int]
SpanFinder = Callable[[str], Iterable[Span]]
"""Text to the (start, end) of each sentence; what is between two of them is white space."""

_ABBREVIATIONS = {
    "english": "mr mrs ms dr prof rev gen col capt lt sgt sen rep gov hon st jr sr vs etc inc ltd "
    "co corp dept est approx no vol fig eq sec ch pp ed eds al cf e.g i.e a.m p.m u.s u.k u.n "
    "ph.d b.c a.d jan feb mar apr jun jul aug sep sept oct nov dec mt ft ave blvd",
    "german": "dr prof hr fr nr bzw z.b d.h u.a usw ca evtl ggf inkl str vgl bd abs jh st",
    "french": "m mm mme mlle dr pr st ste av bd etc cf p.ex env vol no art",
    "spanish": "sr sra srta dr dra prof ud uds etc p.ej av núm pág vol ee.uu",
}
_END = re.compile(
    r"""(?<![.!?…])[.!?…]+["'”’»)\]]*(?=\s)  # a full stop and closing quotes, before white space
      | [。！？]+[」』”’）]*                  # in Chinese and Japanese no white space follows
      | (?<=\S)(?=\s*\n\s*\n)                # an empty line, full stop or not
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"[^\s\"'“‘«(\[]*$")
_NEXT_START = re.compile(r"\s*[\"'“‘«(\[¿¡]*(.?)", re.DOTALL)


class SentenceSplitter:
    """Text to its sentences, without the white space between them. With `keep_newlines`, the line
    breaks after a sentence stay at its end."""

    def __init__(self, find_spans: SpanFinder, keep_newlines: bool = False) -> None:
        self._find_spans = find_spans
        self._keep_newlines = keep_newlines

    def __call__(self, text: str) -> list[str]:
        spans = list(self._find_spans(text))
        sentences = [text[start:end] for start, end in spans]
        if self._keep_newlines:
            for i, ((_, end), (following, _)) in enumerate(pairwise(spans)):
                sentences[i] += "\n" * text.count("\n", end, following)
        return sentences


def build_splitter(kind: str, lang: str, keep_newlines: bool) -> SentenceSplitter:
    """The splitter of --sentence-splitter `kind` ("rules" or "punkt") for a language. Raises
    ConfigError if `kind` is punkt, and NLTK or its data for the language is missing."""
    if kind == "rules":
        abbreviations = frozenset(_ABBREVIATIONS.get(lang, "").split())
        return SentenceSplitter(lambda text: rule_spans(text, abbreviations), keep_newlines)
    find_spans = _punkt(lang)
    if find_spans is None:
        raise ConfigError(
            f"--sentence-splitter punkt needs the package nltk and its punkt_tab data for --lang "
            f"{lang}, and downloads neither: run `python -m nltk.downloader punkt_tab` "
            "where there is a network, or use --sentence-splitter rules"
        )
    return SentenceSplitter(find_spans, keep_newlines)


def available_splitter(lang: str) -> str:
    """What --sentence-splitter auto means on this machine."""
    return "rules" if _punkt(lang) is None else "punkt"


def rule_spans(text: str, abbreviations: frozenset[str] = frozenset()) -> Iterator[Span]:
    """Sentences by rules. One ends at . ! ? … before white space and at 。！？, unless the full
    stop belongs to an abbreviation or an initial ("J. S. Bach"), or a small letter follows; and at
    an empty line."""
    start = _skip_space(text, 0)
    for match in _END.finditer(text):
        end = match.end()
        if end > start and _ends_sentence(text, start, match, abbreviations):
            yield start, end
            start = _skip_space(text, end)
    end = len(text.rstrip())
    if end > start:
        yield start, end


def _ends_sentence(
    text: str, start: int, match: re.Match[str], abbreviations: frozenset[str]
) -> bool:
    mark = match.group()
    if not mark or mark[0] in "。！？":
        return True
    following = _NEXT_START.match(text, match.end())
    assert following is not None
    if following.group(1).islower():
        return False
    if mark != ".":
        return True
    found = _LAST_WORD.search(text, max(start, match.start() - 40), match.start())
    word = found.group() if found else ""
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return not is_initial and word.lower() not in abbreviations


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _punkt(lang: str) -> SpanFinder | None:
    try:
        from nltk.tokenize.punkt import PunktTokenizer

        return PunktTokenizer(lang).span_tokenize
    except (ImportError, LookupError, ValueError):  # no nltk, no data, no such language
        return None
