"""What a misspelled name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], hint: str, cutoff: float = 0.6) -> str:
    """A hint at the known name that is most like another.

    Args:
        name: the unknown name.
        known: the names that there are.
        hint: the text, with ``{}`` for the known name.
        cutoff: how alike they must be, from 0 to 1.

    Returns:
        The text, empty when none is alike.
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return hint.format(near[0]) if near else ""
