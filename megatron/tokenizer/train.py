"""Learns a vocabulary from text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megatron.tokenizer.gpt2_bpe import END_OF_TEXT, GPT2BPETokenizer
from megatron.tokenizer.protocol import Tokenizer

Trainer = Callable[[Iterable[str], int, int], Tokenizer]
"""From texts, the wanted vocabulary size and the least number of times a merged pair occurs."""


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


TRAINERS: dict[str, Trainer] = {"GPT2BPETokenizer": train_byte_level_bpe}
"""What learns the vocabulary of a --tokenizer-type."""
