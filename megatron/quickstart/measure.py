"""What a validation loss is to be compared with, from the documents and their tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.data.indexed import IndexedDataset
from megatron.data.sources import split_documents


@dataclass(frozen=True)
class HeldOut:
    """The validation documents, without any model.

    Attributes:
        tokens: number of their tokens.
        text_bytes: bytes of their texts in UTF-8.
        unigram_entropy: cross entropy, in nats per token, of their tokens under the frequencies of
            the training tokens: the loss of a model that knows how often each token occurs, and
            nothing of its context.
    """

    tokens: int
    text_bytes: int
    unigram_entropy: float

    def bits_per_byte(self, loss: float) -> float:
        """Bits that a model with ``loss`` nats per token needs per byte of text.

        Other than the loss it can be compared between vocabularies.
        """
        return loss / math.log(2) * self.tokens / self.text_bytes


def held_out(prefix: Path, corpus: Path, split: str, vocab_size: int) -> HeldOut:
    """Measures the validation part of a preprocessed corpus.

    Args:
        prefix: the indexed file, one sequence a document.
        corpus: the JSON lines that it was made of, one a document.
        split: as ``--split`` has it.
        vocab_size: number of tokens in the vocabulary.

    Raises:
        ValueError: the two files do not have the same documents.
    """
    documents = IndexedDataset(prefix)
    with corpus.open("rb") as lines:
        text_bytes = [len(json.loads(line)["text"].encode()) for line in lines]
    if len(documents) != len(text_bytes):
        raise ValueError(
            f"{prefix} has {len(documents)} documents and {corpus} {len(text_bytes)}: they do not "
            "belong together"
        )
    training, validation, _ = split_documents(split, len(documents))
    train = token_counts((documents[i] for i in training), vocab_size)
    valid = token_counts((documents[i] for i in validation), vocab_size)
    return HeldOut(
        tokens=int(valid.sum()),
        text_bytes=sum(text_bytes[i] for i in validation),
        unigram_entropy=unigram_cross_entropy(train, valid),
    )


def token_counts(
    documents: Iterable[npt.NDArray[np.integer]], vocab_size: int
) -> npt.NDArray[np.int64]:
    """How often each token occurs, int64[vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in documents:
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def unigram_cross_entropy(train: npt.NDArray[np.int64], valid: npt.NDArray[np.int64]) -> float:
    """Cross entropy in nats per token of ``valid`` under the frequencies of ``train``.

    One is added to every count of ``train``, so that tokens which it lacks have a probability.
    """
    log_probability = np.log((train + 1) / (train + 1).sum())
    return float(-(valid * log_probability).sum() / valid.sum())
