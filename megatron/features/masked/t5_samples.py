"""Samples of T5: the encoder reads a text with sentinels for its gaps, the decoder fills them.

    text      the quick brown fox jumps over the lazy dog
    encoder   the <extra_id_0> fox jumps <extra_id_1> lazy dog </s>
    decoder   <pad> <extra_id_0> quick brown <extra_id_1> over the
    labels    <extra_id_0> quick brown <extra_id_1> over the </s>

The numbers of corrupted tokens and of spans follow from the length alone, as in Raffel et al. 2020
(arXiv:1910.10683, section 3.1.4) and their random_spans_noise_mask: every full sample has the same
lengths and needs the same number of sentinels. The places of the spans are drawn evenly from all
that leave a token between two spans.

Shape suffixes: E tokens of the encoder's input, D of the decoder's, padding included; K spans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.flags import ConfigError
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.masked_batch import NO_LABEL, T5Sample
from megatron.features.masked.segment_samples import SegmentRecipe
from megatron.features.masked.segments import SHORTEST, SegmentRules
from megatron.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

_DECODER_MULTIPLE = 64


@dataclass(frozen=True)
class T5Recipe(SegmentRecipe[T5Sample]):
    """How T5's samples are made from documents, split into sentences or not."""

    cache_name: ClassVar[str] = "t5"
    encoder_length: int
    """Tokens of the encoder's input, padding included."""
    decoder_length: int
    """Tokens of the decoder's input and of the labels, padding included."""
    seed: int
    short_seq_prob: float
    corruption: SpanCorruption
    end: int
    """Token after the encoder's input and the labels."""
    pad: int
    start: int
    """First token of the decoder's input."""
    sentinels: tuple[int, ...]
    vocabulary: int
    """Its size."""
    exact_epochs: int | None = None

    @classmethod
    def from_config(
        cls,
        config: MaskedDataConfig,
        tokenizer: Tokenizer,
        lengths: tuple[int, int | None],
        seed: int,
    ) -> T5Recipe:
        """The recipe that the flags describe; `lengths` are those of the encoder and the decoder,
        None for the default. Raises ConfigError if a
        flag's value is out of its range, or the vocabulary has too few sentinels; ValueError if the
        vocabulary lacks a special token."""
        corruption = SpanCorruption.of(config)
        encoder, decoder = lengths
        needed = _needed(corruption, encoder)
        if decoder is None:
            decoder = decoder_length(config, encoder)
        elif decoder < needed:
            logger.warning(
                "--decoder-seq-length %d is less than the %d tokens that the targets of a full "
                "encoder input of %d need: the encoder's inputs are shorter than they could be",
                decoder,
                needed,
                encoder,
            )
        tokens = corruption.most_tokens(encoder, decoder)
        if tokens < SHORTEST:
            raise ConfigError(
                f"--encoder-seq-length {encoder} and --decoder-seq-length {decoder} are too short "
                f"for {SHORTEST} tokens and the special ones: make them longer"
            )
        sentinels = tuple(tokenizer.sentinels)
        needed = max(corruption.counts(n).spans for n in range(1, tokens + 1))
        if len(sentinels) < needed:
            raise ConfigError(
                f"the vocabulary has {len(sentinels)} sentinels (<extra_id_0> ...), and samples of "
                f"{tokens} tokens with --mask-prob {config.mask_prob} and --mean-noise-span-length "
                f"{config.mean_noise_span_length} have up to {needed} spans: give "
                f"--vocab-extra-ids {needed} or more (T5 has 100)"
            )
        return cls(
            encoder,
            decoder,
            seed,
            config.short_seq_prob,
            corruption,
            tokenizer.eos,
            tokenizer.pad,
            start_token(config, tokenizer),
            sentinels,
            tokenizer.vocab_size,
        )

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def rules(self) -> SegmentRules:
        most = self.corruption.most_tokens(self.encoder_length, self.decoder_length)
        return SegmentRules(most, self.short_seq_prob, "none")

    def sample(
        self, texts: Sequence[npt.NDArray[np.int64]], is_random: bool, rng: np.random.Generator
    ) -> T5Sample:
        (text,) = texts
        starts_K, sizes_K = self.corruption.draw(len(text), rng)
        sentinels_K = np.array(self.sentinels[: len(starts_K)])
        parts, answers, position = [], [], 0
        for sentinel, start, size in zip(sentinels_K[:, None], starts_K, sizes_K, strict=True):
            parts += [text[position:start], sentinel]
            position = start + size
            answers += [sentinel, text[start:position]]
        end = np.array([self.end])
        encoder = np.concatenate([*parts, text[position:], end])
        labels = np.concatenate([*answers, end])
        encoder_tokens_E = np.full(self.encoder_length, self.pad, np.int64)
        encoder_tokens_E[: len(encoder)] = encoder
        decoder_tokens_D = np.full(self.decoder_length, self.pad, np.int64)
        decoder_tokens_D[: len(labels)] = [self.start, *labels[:-1]]
        labels_D = np.full(self.decoder_length, NO_LABEL, np.int64)
        labels_D[: len(labels)] = labels
        is_label_D = np.arange(self.decoder_length) < len(labels)
        is_token_E = np.arange(self.encoder_length) < len(encoder)
        return T5Sample(
            encoder_tokens_E,
            decoder_tokens_D,
            labels_D,
            is_label_D.astype(np.float32),
            is_token_E.astype(np.int64),
            is_label_D.astype(np.int64),
        )


class SpanCounts(NamedTuple):
    """Token counts of a corrupted text."""

    noise: int
    """Corrupted tokens."""
    spans: int
    """Runs of them; each needs a sentinel."""
    encoder: int
    """Tokens of the encoder's input: the uncorrupted ones, the sentinels and the end."""
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

    @classmethod
    def of(cls, config: MaskedDataConfig) -> SpanCorruption:
        """Those of the flags; ConfigError if a flag's value is out of its range."""
        config.check_shares()
        if config.mean_noise_span_length < 1:
            raise ConfigError(
                f"--mean-noise-span-length {config.mean_noise_span_length} must be at least 1"
            )
        if config.max_noise_span_length < config.mean_noise_span_length:
            raise ConfigError(
                f"--max-noise-span-length {config.max_noise_span_length} is below "
                f"--mean-noise-span-length {config.mean_noise_span_length}"
            )
        return cls(config.mask_prob, config.mean_noise_span_length, config.max_noise_span_length)

    def counts(self, tokens: int) -> SpanCounts:
        """The counts for `tokens` >= 1 tokens."""
        noise = min(max(1, round(tokens * self.noise_density)), max(1, tokens - 1))
        # There is a token between two spans; and the longest span must not be exceeded.
        spans = max(round(noise / self.mean_span), -(-noise // self.max_span), 1)
        spans = min(spans, noise, tokens - noise + 1)
        return SpanCounts(noise, spans, tokens - noise + spans + 1, noise + spans + 1)

    def most_tokens(self, encoder: int, decoder: int) -> int:
        """The largest number of tokens such that it and all smaller ones fit inputs of these
        lengths; 0 if none does."""
        tokens = 0
        while True:
            needed = self.counts(tokens + 1)
            if needed.encoder > encoder or needed.decoder > decoder:
                return tokens
            tokens += 1

    def draw(
        self, tokens: int, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First token of each span of a text of `tokens`, ascending, and their sizes: int64[K]."""
        noise, spans, _, _ = self.counts(tokens)
        sizes_K = self._sizes(noise, spans, rng)
        # The tokens not needed between spans are distributed over all gaps, both ends included.
        free = tokens - noise - (spans - 1)
        bars_K = np.sort(rng.choice(free + spans, spans, replace=False)).astype(np.int64)
        before_K = bars_K - np.arange(spans)  # free tokens before each span
        ends_K = np.cumsum(sizes_K)
        return before_K + np.arange(spans) + ends_K - sizes_K, sizes_K

    def _sizes(self, noise: int, spans: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """`spans` numbers from 1 to max_span with the sum `noise`."""
        cuts = np.sort(rng.choice(noise - 1, spans - 1, replace=False)) + 1
        sizes_K = np.diff(cuts, prepend=0, append=noise).astype(np.int64)
        limit = max(self.max_span, -(-noise // spans))
        while (excess := int(np.maximum(sizes_K - limit, 0).sum())) > 0:
            # The excess goes, one token each, to spans below the limit.
            np.minimum(sizes_K, limit, out=sizes_K)
            below = np.flatnonzero(sizes_K < limit)
            sizes_K[rng.choice(below, min(excess, len(below)), replace=False)] += 1
            rest = excess - min(excess, len(below))
            if rest:
                sizes_K[np.argmin(sizes_K)] += rest
        return sizes_K


def start_token(config: MaskedDataConfig, tokenizer: Tokenizer) -> int:
    """First token of the decoder's input."""
    return tokenizer.bos if config.decoder_start_token == "bos" else tokenizer.pad


def decoder_length(config: MaskedDataConfig, encoder: int) -> int:
    """The default of --decoder-seq-length for an encoder's input of `encoder` tokens."""
    needed = _needed(SpanCorruption.of(config), encoder)
    return -(-needed // _DECODER_MULTIPLE) * _DECODER_MULTIPLE


def _needed(corruption: SpanCorruption, encoder: int) -> int:
    """Tokens of the longest labels of an encoder's input of at most `encoder` tokens."""
    unlimited = int(2 * encoder / (1 - corruption.noise_density)) + _DECODER_MULTIPLE
    tokens = corruption.most_tokens(encoder, unlimited)
    return max((corruption.counts(n).decoder for n in range(1, tokens + 1)), default=1)
