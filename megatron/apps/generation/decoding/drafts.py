"""Tokens that are drafted before the model has chosen them, from the text itself.

A draft changes no text: the next step computes the logits after every drafted token, each position
is drawn from its own logits with its own random number, and a draft counts only as far as it equals
these tokens (see `megatron.apps.generation.scheduling.jobs.TextJob`).
"""

from __future__ import annotations

from collections.abc import Iterable

_LENGTHS = (4, 3, 2)  # of the last tokens that are looked up, the longest first


class PromptLookup:
    """Drafts the tokens after the last occurrence of the latest tokens (prompt lookup decoding,
    Saxena 2023). It needs no model, and succeeds where a text repeats its prompt or itself."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # the place after the latest of each n-gram
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Continues the text by a token."""
        tokens, place = self._tokens, len(self._tokens)
        # The last tokens themselves are not looked up: nothing has followed them yet.
        for length in _LENGTHS:
            if place >= length:
                self._next[tuple(tokens[place - length :])] = place
        tokens.append(token)

    def draft(self, count: int) -> tuple[int, ...]:
        """Up to ``count`` tokens that may follow; none if the last ones are new."""
        tokens = self._tokens
        for length in _LENGTHS if count > 0 else ():
            place = self._next.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if place is not None:
                # What repeats with a short period is continued beyond the end of the text.
                period = len(tokens) - place
                return tuple(tokens[place + n % period] for n in range(count))
        return ()
