"""No regular expression of the project takes more than linear time, whatever text it is given."""

import re

import pytest
from import_statements import ROOT
from patterns import UsedPattern, attacks, seconds, used_patterns
from samples import sampled

FOLDERS = ("megatron", "tools", "tasks")
SHORT, LONG = 3000, 24_000
"""Characters of the texts whose times are compared."""
LIMIT = 1.0
NOISE = 0.1
"""Seconds below which a time says nothing."""

BOUNDED = {
    "megatron/features/raw_text/encoder.py:_LAST_WORD": "is applied to 40 characters",
    "megatron/engine/environment.py": "reads torch's own message",
    "megatron/apps/profiling/": "reads names of at most 1,000 characters",
    "megatron/apps/pictures/run_curves.py:_LAYOUT": "reads the names of folders",
}
"""Patterns that are not linear, and why no text of others makes them slow."""


def slow(used: UsedPattern) -> str | None:
    """The method and the text with which a pattern's time grows faster than the text."""
    for method in used.methods:
        for attack in attacks(used.pattern):
            after = seconds(used, method, attack.text(LONG), LIMIT)
            if after > NOISE:
                before = seconds(used, method, attack.text(SHORT), LIMIT)
                if after == LIMIT or after > 3 * LONG / SHORT * before:
                    return f"{method} of {attack} takes {before:.4f}, then {after:.4f} s"
    return None


def found() -> list[UsedPattern]:
    return list(used_patterns(ROOT, FOLDERS))


@pytest.mark.proof
def test_patterns_are_linear():
    patterns = found()
    assert len(patterns) > 90
    linear = [used for used in patterns if not any(map(used.place.startswith, BOUNDED))]
    failures = {used.place: message for used in linear if (message := slow(used))}
    assert not failures, "\n".join(f"{place}: {said}" for place, said in failures.items())


@pytest.mark.parametrize(
    "text",
    sampled(
        [
            r'"[^"\\]*(?:\\.[^"\\]*)*"',
            r"<doc\s+(.*)>\s*$",
            r'(\w+)="([^"]*)"',
            r"\(\s*([^)]*?)\s*\)",
            r"(a+)+$",
            r"(?:a|aa)+!",
        ],
        lambda text: text.startswith("<doc"),
    ),
)
def test_slow_ones_are_found(text):
    assert slow(UsedPattern("here", re.compile(text), ("search",)))
