"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], hint: str, cutoff: float = 0.6) -> str:
    """The known name that is most similar to an unknown one, in ``hint`` for its ``{}``; empty when
    none has a similarity of ``cutoff`` (0 to 1)."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return hint.format(near[0]) if near else ""
