"""Flags of other trainers that are refused, with advice on alternatives."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from megatron.util.files import read_sections

_FLAGS = read_sections(Path(__file__).with_name("refused_flags.txt"))
NETWORKS = _FLAGS["networks"]
"""Other trainers' flags that describe networks, as names or patterns, with advice for each."""
REFUSED = NETWORKS | _FLAGS["others"]
"""All flags of other trainers, as names or patterns, with advice for each."""
OF_2019 = _FLAGS["first releases"]
"""Flags of Megatron-LM's first releases, with advice for each."""
OWN_FLAGS = _FLAGS["programs"]
"""Flags that users often give to the wrong program, by the program that accepts them."""

_PATTERNS = {
    pattern: reason for row, reason in (REFUSED | OF_2019).items() for pattern in row.split()
}


def refused_flag(flag: str) -> str | None:
    """Return the advice for a refused flag of another trainer, or None for any other flag."""
    exact = _PATTERNS.get(flag)
    if exact is not None:
        return exact
    return next((reason for p, reason in _PATTERNS.items() if fnmatchcase(flag, p)), None)
