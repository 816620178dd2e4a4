"""A language model for the tests of the server: how often which token followed which in this
project's documentation. Its texts read almost like text, and it needs no training."""

import re
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "apps" / "generation"))

from fake_runner import RememberingRunner  # noqa: E402

_CONTEXT = 2
"""Tokens that the next one is counted after, at most."""
_TRUST = 0.9
"""Share of the probability that the longest known context has; the rest is the shorter one's."""


@cache
def documents() -> tuple[str, ...]:
    """Sentences without code of this project's pages, five at a time."""
    pages = [path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*/*.md"))]
    paragraphs = [" ".join(p.split()) for page in pages for p in page.split("\n\n")]
    sentences = [s for p in paragraphs for s in re.split(r"(?<=[.]) ", p)]
    plain = [s for s in sentences if re.fullmatch(r"[A-Z][a-z][\w ,;:'-]{40,}[.]", s)]
    return tuple(" ".join(plain[i : i + 5]) for i in range(0, len(plain), 5))


@cache
def counted_tokenizer() -> Tokenizer:
    return train_byte_level_bpe(documents(), 4000, 2)


class CountedRunner(RememberingRunner):
    """Log-probabilities of the token after the last ones, mixed from contexts of each length."""

    def __init__(self, **settings) -> None:
        tokenizer = counted_tokenizer()
        super().__init__(tokenizer.vocab_size, **settings)
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        # One text without an end, so that no answer ends before its longest length.
        tokens = tokenizer.tokenize("\n\n".join(("", *documents())))
        for place, token in enumerate(tokens):
            for length in range(min(place, _CONTEXT) + 1):
                self._counts[tuple(tokens[place - length : place])][token] += 1

    def logits_after(self, sequence_L: tuple[int, ...], encoded: tuple[int, ...] | None) -> Tensor:
        probability_V = torch.full((self.vocab_size,), 1e-9)
        for length in range(_CONTEXT + 1):
            counts = self._counts.get(sequence_L[len(sequence_L) - length :])
            if counts is None or length > len(sequence_L):
                break
            trust = _TRUST if length else 1.0
            counted = torch.tensor(list(counts.values())) / counts.total()
            probability_V *= 1 - trust + 1e-9
            probability_V[list(counts)] += trust * counted
        return probability_V.log()
