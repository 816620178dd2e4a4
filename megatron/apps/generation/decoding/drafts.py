"""Prompt lookup: draft tokens from the text itself for speculative decoding.

Drafts do not change the generated text. The next step computes the logits after every drafted
token, and each position is sampled from its own logits with its own random number. A draft is
accepted up to the first token that differs from the sampled one (see
`megatron.apps.generation.scheduling.jobs.TextJob`).
"""

from __future__ import annotations

from collections.abc import Iterable

_LENGTHS = (4, 3, 2)  # n-gram lengths to look up, longest first


class PromptLookup:
    """Drafter that proposes the tokens that followed the previous occurrence of the latest n-gram
    (prompt lookup decoding, Saxena 2023). It needs no model, and works well where a text repeats
    its prompt or itself."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        # Position after the latest occurrence of each n-gram.
        self._next: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        tokens, place = self._tokens, len(self._tokens)
        # N-grams that end before the new token are indexed. The one that ends with it is not: no
        # token has followed it yet.
        for length in _LENGTHS:
            if place >= length:
                self._next[tuple(tokens[place - length :])] = place
        tokens.append(token)

    def draft(self, count: int) -> tuple[int, ...]:
        """Return ``count`` draft tokens, or none if the latest n-grams are new."""
        tokens = self._tokens
        for length in _LENGTHS if count > 0 else ():
            place = self._next.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if place is not None:
                # If fewer than ``count`` tokens follow the occurrence, repeat them.
                period = len(tokens) - place
                return tuple(tokens[place + n % period] for n in range(count))
        return ()
