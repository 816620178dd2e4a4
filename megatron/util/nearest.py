"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], hint: str, cutoff: float = 0.6) -> str:
    """A hint at the known name that is most similar to an unknown one; empty when none is.

    Args:
        name: the unknown name.
        known: the known names.
        hint: the text, with ``{}`` for the known name.
        cutoff: required similarity, from 0 to 1.
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return hint.format(near[0]) if near else ""
