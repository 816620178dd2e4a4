"""Learns a vocabulary from text."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from megatron.tokenizer.gpt2_bpe import END_OF_TEXT, GPT2BPETokenizer
from megatron.tokenizer.protocol import TextSource, Tokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.train_sentence_piece import train_sentencepiece_model
from megatron.tokenizer.wordpiece import SPECIAL_TOKENS, UNKNOWN, WordPieceTokenizer

_MOST_CHARACTERS = 1000
_LEAST_WORDPIECES = 32


@dataclass(frozen=True)
class TrainingOptions:
    """What of the vocabulary is wanted."""

    vocab_size: int
    """Number of tokens."""
    min_frequency: int = 2
    """A pair is merged only when it occurs this often; SentencePiece has no such limit."""
    model_type: str = "bpe"
    """Of SentencePiece: unigram, bpe or char."""
    byte_fallback: bool = False
    """Of SentencePiece: see `train_sentencepiece`."""


Trainer = Callable[[TextSource, TrainingOptions], Tokenizer]


def train_byte_level_bpe(
    texts: Iterable[str], vocab_size: int, min_frequency: int
) -> GPT2BPETokenizer:
    """Learns a byte-level byte-pair encoding in GPT-2's form.

    Ids: the 256 bytes in GPT-2's order, the merged tokens in the order they were learned,
    `<|endoftext|>` last. The same texts give the same vocabulary. It may come out smaller than
    `vocab_size`, when no more pairs occur `min_frequency` times.

    Raises:
        ValueError: `vocab_size` leaves no room for the bytes and `<|endoftext|>`.
    """
    if vocab_size < 257:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: the 256 bytes and {END_OF_TEXT} take 257"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab, merges = model["vocab"], [(left, right) for left, right in model["merges"]]
    return GPT2BPETokenizer({**vocab, END_OF_TEXT: len(vocab)}, merges)


def train_wordpiece(
    texts: TextSource, vocab_size: int, min_frequency: int, lower_case: bool
) -> WordPieceTokenizer:
    """Learns a vocabulary in the form of BERT's vocab.txt.

    Ids: [PAD], [UNK], [CLS], [SEP], [MASK], the characters, each again with `##`, then longer
    pieces in the order they were learned. The characters are the most frequent ones, at most 1,000
    and a quarter of the vocabulary. The same texts give the same vocabulary.

    Args:
        texts: gives the texts; it is called twice.

    Raises:
        ValueError: `vocab_size` leaves no room for characters.
    """
    if vocab_size < _LEAST_WORDPIECES:
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: five special tokens and the characters take "
            f"{_LEAST_WORDPIECES} at least"
        )
    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(normalizer.normalize_str(text))
    # tokenizers cuts the characters off by itself, but of equally frequent ones it keeps any.
    by_frequency = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    characters = sorted(by_frequency[: min(_MOST_CHARACTERS, (vocab_size - 5) // 4)])

    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        # Left to itself, the trainer numbers ##characters in a random order.
        special_tokens=[*SPECIAL_TOKENS.values(), *characters, *(f"##{c}" for c in characters)],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    vocab = tokenizer.get_vocab()
    return WordPieceTokenizer(
        {t: vocab[t] for t in sorted(vocab, key=vocab.__getitem__)}, lower_case
    )


def _gpt2_bpe(texts: TextSource, options: TrainingOptions) -> Tokenizer:
    return train_byte_level_bpe(texts(), options.vocab_size, options.min_frequency)


def _lower_case(texts: TextSource, options: TrainingOptions) -> Tokenizer:
    return train_wordpiece(texts, options.vocab_size, options.min_frequency, lower_case=True)


def _cased(texts: TextSource, options: TrainingOptions) -> Tokenizer:
    return train_wordpiece(texts, options.vocab_size, options.min_frequency, lower_case=False)


def _sentence_piece(texts: TextSource, options: TrainingOptions) -> Tokenizer:
    model = train_sentencepiece_model(
        texts(), options.model_type, options.vocab_size, options.byte_fallback
    )
    return SentencePieceTokenizer.gpt_from_model(model)


TRAINERS: dict[str, Trainer] = {
    "GPT2BPETokenizer": _gpt2_bpe,
    "BertWordPieceLowerCase": _lower_case,
    "BertWordPieceCase": _cased,
    "SentencePieceTokenizer": _sentence_piece,
}
"""What learns the vocabulary of a --tokenizer-type."""
