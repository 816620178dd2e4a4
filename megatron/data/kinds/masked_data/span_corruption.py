"""T5's objective: spans of tokens are replaced by sentinels, and are what is to be predicted.

The numbers of corrupted tokens and of spans follow from the length alone, as in Raffel et al. 2020
(arXiv:1910.10683, section 3.1.4) and their random_spans_noise_mask: so every full sample has the
same lengths and needs the same number of sentinels. Where the spans lie is drawn evenly among all
ways that leave a token between two of them.

Shape suffixes: K spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Lengths(NamedTuple):
    """What becomes of a number of tokens."""

    noise: int
    """Tokens that are corrupted."""
    spans: int
    """Runs of them; each takes a sentinel."""
    encoder: int
    """Tokens of the encoder's input: what is left, the sentinels and the end."""
    decoder: int
    """Tokens of the decoder's input, and of the labels."""


@dataclass(frozen=True)
class SpanCorruption:
    """How spans are drawn."""

    noise_density: float
    """Share of the tokens that are corrupted."""
    mean_span: float
    """Mean tokens of a span."""
    max_span: int
    """Most tokens of a span."""

    def lengths(self, tokens: int) -> Lengths:
        """The lengths for `tokens` tokens, at least 1."""
        noise = min(max(1, round(tokens * self.noise_density)), max(1, tokens - 1))
        # Between two spans there is a token; and no span may be forced over the longest.
        spans = max(round(noise / self.mean_span), -(-noise // self.max_span), 1)
        spans = min(spans, noise, tokens - noise + 1)
        return Lengths(noise, spans, tokens - noise + spans + 1, noise + spans + 1)

    def most_tokens(self, encoder: int, decoder: int) -> int:
        """The largest number of tokens such that it and all below it fit into an encoder's and a
        decoder's input of these lengths; 0 when none does."""
        tokens = 0
        while True:
            needed = self.lengths(tokens + 1)
            if needed.encoder > encoder or needed.decoder > decoder:
                return tokens
            tokens += 1

    def draw(
        self, tokens: int, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the spans of `tokens` tokens begin, rising, and the tokens of each: int64[K]."""
        noise, spans, _, _ = self.lengths(tokens)
        sizes_K = self._sizes(noise, spans, rng)
        # The tokens that no gap must have are spread over all gaps, in front and behind included.
        free = tokens - noise - (spans - 1)
        bars_K = np.sort(rng.choice(free + spans, spans, replace=False)).astype(np.int64)
        before_K = bars_K - np.arange(spans)  # free tokens in front of each span
        ends_K = np.cumsum(sizes_K)
        return before_K + np.arange(spans) + ends_K - sizes_K, sizes_K

    def _sizes(self, noise: int, spans: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """`spans` numbers from 1 to max_span with the sum `noise`."""
        cuts = np.sort(rng.choice(noise - 1, spans - 1, replace=False)) + 1
        sizes_K = np.diff(cuts, prepend=0, append=noise).astype(np.int64)
        limit = max(self.max_span, -(-noise // spans))
        while (excess := int(np.maximum(sizes_K - limit, 0).sum())) > 0:
            # What is over the limit goes, a token each, to spans that have room.
            np.minimum(sizes_K, limit, out=sizes_K)
            room = np.flatnonzero(sizes_K < limit)
            sizes_K[rng.choice(room, min(excess, len(room)), replace=False)] += 1
            rest = excess - min(excess, len(room))
            if rest:
                sizes_K[np.argmin(sizes_K)] += rest
        return sizes_K
