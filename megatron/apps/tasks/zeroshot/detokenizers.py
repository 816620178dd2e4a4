"""Text of word-level corpora as it was before it was divided into words, so that a model reads the
text that it knows. The rules are those of Megatron-LM, in its order, on which published
perplexities depend."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial, reduce

Rule = tuple[str, str] | Callable[[str], str]
"""What is replaced, by what; or a function of the text."""

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
    # Behind the last end nothing matches, and each start would search all of the rest for one.
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
    return name, lambda text: reduce(_applied, _RULES[name] if name else (), text)


def _applied(text: str, rule: Rule) -> str:
    return text.replace(*rule) if isinstance(rule, tuple) else rule(text)
