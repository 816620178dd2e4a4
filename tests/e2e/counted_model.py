"""A language model for the tests of the server: how often which token followed which in this
project's own documentation. Its texts read like text, and it needs no training."""

import re
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.tokenizer import Tokenizer
from megatron.tokenizer.train import train_byte_level_bpe

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "inference"))

from fake_runner import RememberingRunner  # noqa: E402

_CONTEXT = 3
"""Tokens that the next one is counted after, at most."""
_TRUST = 0.75
"""Share of the probability that the longest known context has; the rest is the shorter one's."""


@cache
def documents() -> tuple[str, ...]:
    """Paragraphs of prose of the guides."""
    pages = [path.read_text("utf-8") for path in sorted((ROOT / "docs" / "guides").glob("*.md"))]
    paragraphs = [p.replace("\n", " ") for page in pages for p in page.split("\n\n")]
    return tuple(p for p in paragraphs if re.match(r"[A-Z][a-z]", p) and len(p) > 80)


@cache
def counted_tokenizer() -> Tokenizer:
    return train_byte_level_bpe(documents(), 1200, 2)


class CountedRunner(RememberingRunner):
    """Log-probabilities of the token after the last ones, mixed from contexts of each length."""

    def __init__(self, **settings) -> None:
        tokenizer = counted_tokenizer()
        super().__init__(tokenizer.vocab_size, **settings)
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in documents():
            tokens = (*tokenizer.tokenize("\n\n" + text), tokenizer.eod)
            for place, token in enumerate(tokens):
                for length in range(min(place, _CONTEXT) + 1):
                    self._counts[tokens[place - length : place]][token] += 1

    def logits_after(self, sequence_L: tuple[int, ...], encoded: tuple[int, ...] | None) -> Tensor:
        probability_V = torch.full((self.vocab_size,), 1 / self.vocab_size)
        for length in range(_CONTEXT + 1):
            counts = self._counts.get(sequence_L[len(sequence_L) - length :])
            if counts is None or length > len(sequence_L):
                break
            share = _TRUST / counts.total()
            probability_V *= 1 - _TRUST
            probability_V[list(counts)] += share * torch.tensor(list(counts.values()))
        return probability_V.log()
