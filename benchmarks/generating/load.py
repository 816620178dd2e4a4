"""The requests that are measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple


class Request(NamedTuple):
    """Token ids to continue by exactly ``new_tokens``, the most probable ones."""

    prompt: list[int]
    new_tokens: int


class Mix(NamedTuple):
    """Requests of mixed lengths; ``prompts`` and ``outputs`` are the least and most tokens."""

    count: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    vocabulary: int

    def requests(self, number: int) -> list[Request]:
        """Lengths that are the same every time, uniformly distributed; tokens that are not, so that
        no round finds what another one has computed."""
        lengths, tokens = random.Random(1), random.Random(1000 + number)
        return [
            Request(
                tokens.choices(range(self.vocabulary), k=lengths.randint(*self.prompts)),
                lengths.randint(*self.outputs),
            )
            for _ in range(self.count)
        ]


def counts(requests: Sequence[Request]) -> tuple[int, int]:
    """Tokens of the prompts, and new ones."""
    return sum(len(r.prompt) for r in requests), sum(r.new_tokens for r in requests)
