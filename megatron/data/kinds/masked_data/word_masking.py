"""BERT's masks: which tokens are to be predicted, and what stands in their place.

Words are chosen whole and at random, one or a few in a row, until a share of the tokens is reached;
of the chosen tokens 80 % become the mask token, 10 % a random token and 10 % stay (Devlin et al.
2018, arXiv:1810.04805, section 3.1). Chances of n words in a row are those of Lan et al. 2019,
arXiv:1909.11942, section 3.1, as Megatron has them.

Shape suffixes: S tokens of a sample, P tokens to be predicted, W words, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

MASKED, RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class WordMasking:
    """How tokens are masked."""

    mask_prob: float
    """Share of a sample's tokens, special ones counted, that are to be predicted."""
    max_predictions: int
    """Most tokens of a sample that are to be predicted."""
    max_ngrams: int
    """Most words in a row that are chosen together."""
    favor_longer: bool
    """Whether more words in a row are likelier than fewer."""
    mask_token: int
    vocab_size: int
    """Random tokens are drawn from all below it."""
    word_starts_V: npt.NDArray[np.bool_] | None = field(compare=False, repr=False)
    """Whether a token begins a word; None masks each token by itself."""

    @cached_property
    def ngram_chances(self) -> npt.NDArray[np.float64]:
        """Chance of 1, 2 ... `max_ngrams` words in a row."""
        chances = 1.0 / np.arange(1, self.max_ngrams + 1)
        return (chances[::-1] if self.favor_longer else chances) / chances.sum()

    def choose(
        self,
        tokens_S: npt.NDArray[np.int64],
        segments: Sequence[range],
        rng: np.random.Generator,
    ) -> npt.NDArray[np.int64]:
        """Positions of the tokens to be predicted, rising, int64[P].

        There is at least one, unless every word has more tokens than `max_predictions`.

        Args:
            segments: positions of the words; the others hold special tokens, which are never
                chosen.
        """
        starts_W, stops_W, words_left_W = self._words(tokens_S, segments)
        sizes_W = (stops_W - starts_W).tolist()
        wanted = max(1, round(len(tokens_S) * self.mask_prob))
        left = min(self.max_predictions, wanted)
        # One draw for all words: searchsorted of an even number in the summed chances.
        drawn = np.searchsorted(self.ngram_chances.cumsum(), rng.random(len(sizes_W)), "right") + 1
        ngrams_W = np.minimum(np.minimum(drawn, self.max_ngrams), words_left_W).tolist()
        chosen_W = bytearray(len(sizes_W))
        for word in rng.permutation(len(sizes_W)).tolist():
            count = ngrams_W[word]
            while count and sum(sizes_W[word : word + count]) > left:
                count -= 1
            if not count or any(chosen_W[word : word + count]):
                continue
            chosen_W[word : word + count] = b"\x01" * count
            left -= sum(sizes_W[word : word + count])
            if not left:
                break
        if not any(chosen_W) and min(sizes_W) <= self.max_predictions:
            chosen_W[sizes_W.index(min(sizes_W))] = 1  # more than the share, for want of less
        words = np.flatnonzero(np.frombuffer(chosen_W, np.uint8))
        ranges = [np.arange(starts_W[word], stops_W[word]) for word in words]
        return np.concatenate(ranges) if ranges else np.empty(0, np.int64)

    def replace(
        self, tokens_S: npt.NDArray[np.int64], chosen_P: np.ndarray, rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """The tokens with others in the place of most of the chosen ones."""
        replaced_S = tokens_S.copy()
        draw_P = rng.random(len(chosen_P))
        random_P = rng.integers(self.vocab_size, size=len(chosen_P))
        replaced_S[chosen_P] = np.where(
            draw_P < MASKED,
            self.mask_token,
            np.where(draw_P < MASKED + RANDOM, random_P, tokens_S[chosen_P]),
        )
        return replaced_S

    def _words(
        self, tokens_S: np.ndarray, segments: Sequence[range]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First position of each word, the one behind it, and words from it on in its segment."""
        starts, stops, words_left = [], [], []
        for segment in segments:
            assert segment, "a segment has tokens"
            if self.word_starts_V is None:
                start = np.arange(segment.start, segment.stop)
            else:
                begins = self.word_starts_V[tokens_S[segment.start : segment.stop]].copy()
                begins[:1] = True  # of a word that was cut, or that has no mark at the start
                start = segment.start + np.flatnonzero(begins)
            starts.append(start)
            stops.append(np.append(start[1:], segment.stop))
            words_left.append(np.arange(len(start), 0, -1))
        return np.concatenate(starts), np.concatenate(stops), np.concatenate(words_left)
