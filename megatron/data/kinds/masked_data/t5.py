"""Samples of T5: the encoder reads a text with sentinels for its gaps, the decoder fills them.

    text      the quick brown fox jumps over the lazy dog
    encoder   the <extra_id_0> fox jumps <extra_id_1> lazy dog </s>
    decoder   <pad> <extra_id_0> quick brown <extra_id_1> over the
    labels    <extra_id_0> quick brown <extra_id_1> over the </s>

Shape suffixes: E tokens of the encoder's input, D of the decoder's, padding included.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from megatron.config.flags import ConfigError
from megatron.config.kinds.masked_data import MaskedDataConfig
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.kinds.masked_data.batch import T5Sample
from megatron.data.kinds.masked_data.index import NO_LABEL, segment_index
from megatron.data.kinds.masked_data.random_state import sample_rng
from megatron.data.kinds.masked_data.segments import SHORTEST, SegmentRules
from megatron.data.kinds.masked_data.sentences import SentenceNumbers, join, token_count, trimmed
from megatron.data.kinds.masked_data.span_corruption import SpanCorruption
from megatron.data.samples import Documents, Piece, checked_index
from megatron.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

_DECODER_MULTIPLE = 64


@dataclass(frozen=True)
class T5Recipe:
    """How T5's samples are made of documents, split into sentences or not."""

    encoder_length: int
    """Tokens of the encoder's input, padding included."""
    decoder_length: int
    """Tokens of the decoder's input and of the labels, padding included."""
    seed: int
    short_seq_prob: float
    corruption: SpanCorruption
    start: int
    """Token that the decoder begins with: the padding token, as T5 has it."""
    end: int
    """Token behind the encoder's input and the labels."""
    pad: int
    sentinels: tuple[int, ...]

    @classmethod
    def from_config(
        cls, config: MaskedDataConfig, tokenizer: Tokenizer, seq_length: int, seed: int
    ) -> T5Recipe:
        """The recipe that the flags describe; `seq_length` is --seq-length.

        Raises:
            ConfigError: a flag's value is out of its range, or the vocabulary has too few
                sentinels.
            ValueError: the vocabulary lacks a special token.
        """
        config.check_shares()
        if config.mean_noise_span_length < 1:
            raise ConfigError(
                f"--mean-noise-span-length {config.mean_noise_span_length}: give a number from 1 on"
            )
        if config.max_noise_span_length < config.mean_noise_span_length:
            raise ConfigError(
                f"--max-noise-span-length {config.max_noise_span_length} is below "
                f"--mean-noise-span-length {config.mean_noise_span_length}"
            )
        corruption = SpanCorruption(
            config.mask_prob, config.mean_noise_span_length, config.max_noise_span_length
        )
        encoder, decoder = _sequence_lengths(config, seq_length, corruption)
        tokens = corruption.most_tokens(encoder, decoder)
        if tokens < SHORTEST:
            raise ConfigError(
                f"--encoder-seq-length {encoder} and --decoder-seq-length {decoder} leave no room "
                f"for {SHORTEST} tokens and the special ones: make them longer"
            )
        sentinels = tuple(tokenizer.sentinels)
        needed = max(corruption.lengths(n).spans for n in range(1, tokens + 1))
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
            tokenizer.pad,
            tokenizer.eos,
            tokenizer.pad,
            sentinels,
        )

    @property
    def max_tokens(self) -> int:
        """Tokens of the text of a sample, before its spans are taken out, at most."""
        return self.corruption.most_tokens(self.encoder_length, self.decoder_length)

    def units(self, documents: Documents) -> int:
        """The number of documents."""
        return len(documents.document_indices) - 1

    def build(
        self,
        documents: Documents,
        units: range,
        num_samples: int,
        name: str,
        cache: IndexCache,
    ) -> T5Dataset:
        """`num_samples` samples of the documents `units`; see SampleRecipe.

        Raises:
            ValueError: no sample can be made of the documents.
        """
        rules = SegmentRules(self.max_tokens, self.short_seq_prob, "none")
        index = segment_index(documents, units, rules, num_samples, self.seed, name, cache, "t5")
        first_sequence = int(documents.document_indices[units.start])
        return T5Dataset(documents, self, first_sequence, name, index)


class T5Dataset:
    """Samples of T5 by number; made by T5Recipe.build."""

    def __init__(
        self,
        documents: Documents,
        recipe: T5Recipe,
        first_sequence: int,
        name: str,
        index: StoredArrays,
    ) -> None:
        self.documents = documents
        self.recipe = recipe
        self.name = name
        self._max_tokens = recipe.max_tokens
        self._first_sequence = first_sequence
        self._index = index

    def __len__(self) -> int:
        return len(self._index["segments"])

    def __getitem__(self, index: int, /) -> T5Sample:
        index = checked_index(index, len(self))
        rng = sample_rng(self.recipe.seed, self.name, index)
        text = join(self.documents, self._pieces(index, rng))
        starts_K, sizes_K = self.recipe.corruption.draw(len(text), rng)
        sentinels_K = np.array(self.recipe.sentinels[: len(starts_K)])
        stops_K = starts_K + sizes_K
        encoder, labels, position = [], [], 0
        for sentinel, start, stop in zip(sentinels_K[:, None], starts_K, stops_K, strict=True):
            encoder += [text[position:start], sentinel]
            labels += [sentinel, text[start:stop]]
            position = stop
        end = np.array([self.recipe.end])
        return self._padded(
            np.concatenate([*encoder, text[position:], end]), np.concatenate([*labels, end])
        )

    def origin(self, index: int, /) -> list[Piece]:
        """Where the text of sample `index` comes from, before its spans were taken out."""
        index = checked_index(index, len(self))
        return self._pieces(index, sample_rng(self.recipe.seed, self.name, index))

    def _pieces(self, index: int, rng: np.random.Generator) -> list[Piece]:
        numbers = SentenceNumbers.from_arrays(self._first_sequence, self._max_tokens, self._index)
        pieces = numbers.pieces(self.documents, *self._index["segments"][index].tolist())
        surplus = max(0, token_count(pieces) - self._max_tokens)
        front = int(rng.binomial(surplus, 0.5))
        return trimmed(pieces, front, surplus - front)

    def _padded(self, encoder: np.ndarray, labels: np.ndarray) -> T5Sample:
        recipe = self.recipe
        encoder_tokens_E = np.full(recipe.encoder_length, recipe.pad, np.int64)
        encoder_tokens_E[: len(encoder)] = encoder
        decoder_tokens_D = np.full(recipe.decoder_length, recipe.pad, np.int64)
        decoder_tokens_D[0] = recipe.start
        decoder_tokens_D[1 : len(labels)] = labels[:-1]
        labels_D = np.full(recipe.decoder_length, NO_LABEL, np.int64)
        labels_D[: len(labels)] = labels
        is_label_D = np.arange(recipe.decoder_length) < len(labels)
        is_token_E = np.arange(recipe.encoder_length) < len(encoder)
        return T5Sample(
            encoder_tokens_E,
            decoder_tokens_D,
            labels_D,
            is_label_D.astype(np.float32),
            is_token_E.astype(np.int64),
            is_label_D.astype(np.int64),
        )


def _sequence_lengths(
    config: MaskedDataConfig, seq_length: int, corruption: SpanCorruption
) -> tuple[int, int]:
    """Of the encoder's and the decoder's input."""
    encoder = seq_length if config.encoder_seq_length is None else config.encoder_seq_length
    unlimited = int(2 * encoder / (1 - config.mask_prob)) + _DECODER_MULTIPLE
    tokens = corruption.most_tokens(encoder, unlimited)
    needed = max((corruption.lengths(n).decoder for n in range(1, tokens + 1)), default=1)
    decoder = config.decoder_seq_length
    if decoder is None:
        decoder = -(-needed // _DECODER_MULTIPLE) * _DECODER_MULTIPLE
    elif decoder < needed:
        logger.warning(
            "--decoder-seq-length %d is less than the %d tokens that the targets of a full encoder "
            "input of %d need: the encoder's inputs are shorter than they could be",
            decoder,
            needed,
            encoder,
        )
    return encoder, decoder
