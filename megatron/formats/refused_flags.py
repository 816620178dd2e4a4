"""Flags of other trainers that are refused, and what to use instead."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from megatron.util.files import read_sections

_FLAGS = read_sections(Path(__file__).with_name("refused_flags.txt"))
NETWORKS = _FLAGS["networks"]
"""Names and patterns of other trainers' flags that describe networks, and what to use instead."""
REFUSED = NETWORKS | _FLAGS["others"]
"""The same of all their flags."""
OF_2019 = _FLAGS["first releases"]
"""The same for flags of Megatron-LM's first releases."""
OWN_FLAGS = _FLAGS["programs"]
"""Flags that people give to another program, by the program that has them."""

_PATTERNS = {
    pattern: reason for row, reason in (REFUSED | OF_2019).items() for pattern in row.split()
}


def refused_flag(flag: str) -> str | None:
    """Return the advice for a flag of another trainer; None for any other flag."""
    exact = _PATTERNS.get(flag)
    if exact is not None:
        return exact
    return next((reason for p, reason in _PATTERNS.items() if fnmatchcase(flag, p)), None)
