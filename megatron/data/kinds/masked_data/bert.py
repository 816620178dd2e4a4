"""Samples of BERT: `[CLS] A [SEP] B [SEP]`, some words hidden, and whether B belongs behind A.

Shape suffix: S tokens of a sample, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from megatron.config.flags import ConfigError
from megatron.config.kinds.masked_data import MaskedDataConfig
from megatron.data.index_cache import IndexCache, StoredArrays
from megatron.data.kinds.masked_data.batch import BertSample
from megatron.data.kinds.masked_data.index import NO_LABEL, segment_index
from megatron.data.kinds.masked_data.random_state import sample_rng
from megatron.data.kinds.masked_data.segments import Pairs, SegmentRules
from megatron.data.kinds.masked_data.sentences import SentenceNumbers, join, token_count, trimmed
from megatron.data.kinds.masked_data.word_masking import WordMasking
from megatron.data.samples import Documents, Piece, checked_index
from megatron.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class BertRecipe:
    """How BERT's samples are made of documents that are split into sentences.

    Documents of fewer than two sentences make no pairs and are left out.
    """

    seq_length: int
    """Tokens of a sample, padding included."""
    seed: int
    pairs: Pairs
    short_seq_prob: float
    cls: int
    sep: int
    pad: int
    masking: WordMasking

    @classmethod
    def from_config(
        cls, config: MaskedDataConfig, tokenizer: Tokenizer, seq_length: int, seed: int
    ) -> BertRecipe:
        """The recipe that the flags describe.

        Raises:
            ConfigError: a flag's value is out of its range.
            ValueError: the vocabulary lacks a special token.
        """
        config.check_shares()
        pairs: Pairs = "none"
        if config.bert_binary_head:
            pairs = cast(Pairs, config.bert_pair_task)
        if config.max_ngrams < 1:
            raise ConfigError(f"--max-ngrams {config.max_ngrams}: give a number of words from 1 on")
        shortest = 5 if config.bert_binary_head else 4
        if seq_length < shortest:
            raise ConfigError(
                f"--seq-length {seq_length}: the special tokens and two others take {shortest}"
            )
        masking = WordMasking(
            config.mask_prob,
            config.max_predictions(seq_length),
            config.max_ngrams,
            config.favor_longer_ngram,
            tokenizer.mask,
            tokenizer.vocab_size,
            tokenizer.word_starts if config.whole_word_masking else None,
        )
        return cls(
            seq_length,
            seed,
            pairs,
            config.short_seq_prob,
            tokenizer.cls,
            tokenizer.sep,
            tokenizer.pad,
            masking,
        )

    @property
    def max_tokens(self) -> int:
        """Tokens of the segments of a sample at most: without the special ones."""
        return self.seq_length - (2 if self.pairs == "none" else 3)

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
    ) -> BertDataset:
        """`num_samples` samples of the documents `units`; see SampleRecipe.

        Raises:
            ValueError: no sample can be made of the documents.
        """
        rules = SegmentRules(self.max_tokens, self.short_seq_prob, self.pairs)
        index = segment_index(documents, units, rules, num_samples, self.seed, name, cache, "bert")
        first_sequence = int(documents.document_indices[units.start])
        return BertDataset(documents, self, first_sequence, name, index)


class BertDataset:
    """Samples of BERT by number; made by BertRecipe.build."""

    def __init__(
        self,
        documents: Documents,
        recipe: BertRecipe,
        first_sequence: int,
        name: str,
        index: StoredArrays,
    ) -> None:
        self.documents = documents
        self.recipe = recipe
        self.name = name
        self._first_sequence = first_sequence
        self._index = index

    def __len__(self) -> int:
        return len(self._index["segments"])

    def __getitem__(self, index: int, /) -> BertSample:
        index = checked_index(index, len(self))
        rng = sample_rng(self.recipe.seed, self.name, index)
        segments, is_random = self._segments(index, rng)
        recipe = self.recipe
        tokens = [np.array([recipe.cls])]
        positions = []
        for pieces in segments:
            start = sum(map(len, tokens))
            tokens += [join(self.documents, pieces), np.array([recipe.sep])]
            positions.append(range(start, start + len(tokens[-2])))
        used = np.concatenate(tokens)
        chosen = recipe.masking.choose(used, positions, rng)
        size = len(used)
        tokens_S = np.full(recipe.seq_length, recipe.pad, np.int64)
        tokens_S[:size] = recipe.masking.replace(used, chosen, rng)
        types_S = np.zeros(recipe.seq_length, np.int64)
        types_S[positions[0].stop + 1 : size] = 1
        labels_S = np.full(recipe.seq_length, NO_LABEL, np.int64)
        labels_S[chosen] = used[chosen]
        loss_mask_S = np.zeros(recipe.seq_length, np.float32)
        loss_mask_S[chosen] = 1.0
        padding_mask_S = np.zeros(recipe.seq_length, np.int64)
        padding_mask_S[:size] = 1
        return BertSample(tokens_S, types_S, labels_S, int(is_random), loss_mask_S, padding_mask_S)

    def origin(self, index: int, /) -> list[Piece]:
        """Where the tokens of sample `index` come from, special ones left out, in their order."""
        index = checked_index(index, len(self))
        segments, _ = self._segments(index, sample_rng(self.recipe.seed, self.name, index))
        return [piece for pieces in segments for piece in pieces]

    def _segments(
        self, index: int, rng: np.random.Generator
    ) -> tuple[list[list[Piece]], bool | np.bool_]:
        """The segments of a sample, and whether the second does not belong behind the first."""
        numbers = SentenceNumbers.from_arrays(
            self._first_sequence, self.recipe.max_tokens, self._index
        )
        row = self._index["segments"][index].tolist()
        segments = [numbers.pieces(self.documents, *row[i : i + 2]) for i in range(0, len(row), 2)]
        is_random: bool | np.bool_ = False
        if self.recipe.pairs == "next-sentence":
            is_random = row[2] != row[1]
        elif self.recipe.pairs == "sentence-order":
            is_random = rng.random() < 0.5
            if is_random:
                segments.reverse()
        lengths = [token_count(pieces) for pieces in segments]
        cuts = surplus(lengths, self.recipe.max_tokens)
        for i, cut in enumerate(cuts):
            if cut:
                # Token by token at the front or at the back, each as likely.
                front = int(rng.binomial(cut, 0.5))
                segments[i] = trimmed(segments[i], front, cut - front)
        return segments, is_random


def surplus(lengths: list[int], limit: int) -> list[int]:
    """Tokens to take off each of one or two segments, so that together they have `limit`.

    One after the other off the longer one, and off the second when they are equally long, as
    google-research/bert does it.
    """
    excess = max(0, sum(lengths) - limit)
    if len(lengths) == 1:
        return [excess]
    first, second = lengths
    longer = min(excess, abs(first - second))
    of_both = excess - longer
    off_first = (longer if first > second else 0) + of_both // 2
    return [off_first, excess - off_first]
