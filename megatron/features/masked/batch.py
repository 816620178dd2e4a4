"""Samples and batches of BERT and T5, and their mock data.

Shape suffixes: B micro batch, S tokens of a BERT sample, E tokens of a T5 encoder's input, D tokens
of its decoder's input, P predicted positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.data.gpt_batch import positions_within
from megatron.data.index_cache import IndexCache
from megatron.data.loader import mapped
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import RepeatedSamples, SampleDataset, checked_range
from megatron.data.sources import PARTS
from megatron.data.texts import ScoredText, padded
from megatron.features.masked.segments import SegmentRecipe
from megatron.tokenizer.base import SpecialIds, TokenIds, Tokenizer, WordStarts
from megatron.util.digests import digest

NO_LABEL = -1
"""Label of tokens that are not predicted, as in Megatron."""

_PREDICTIONS_MULTIPLE = 8
"""The number of predicted positions per sample is rounded up to a multiple of this, which suits the
GEMMs of the head. Samples of full length then have the same number."""


class BertSample(NamedTuple):
    """BERT sample, padded to the sequence length. The fields are those of `BertBatch`."""

    tokens_S: npt.NDArray[np.int64]
    types_S: npt.NDArray[np.int64]
    labels_S: npt.NDArray[np.int64]
    is_random: int
    loss_mask_S: npt.NDArray[np.float32]
    padding_mask_S: npt.NDArray[np.int64]
    document_ids_S: npt.NDArray[np.int64] | None = None

    @classmethod
    def packed(cls, samples: Sequence[BertSample], *, pad: int) -> BertSample:
        """Concatenate samples without pairs into one sample of the same length. They must fit."""
        sizes = [int(sample.padding_mask_S.sum()) for sample in samples]

        def joined(name: str) -> npt.NDArray[np.int64]:
            pairs = zip(samples, sizes, strict=True)
            return np.concatenate([getattr(sample, name)[:size] for sample, size in pairs])

        tokens, types, labels = map(joined, ("tokens_S", "types_S", "labels_S"))
        positions_P, seq_length = np.flatnonzero(labels != NO_LABEL), len(samples[0].tokens_S)
        labels_P = labels[positions_P]
        whole = cls.padded(tokens, types, positions_P, labels_P, 0, seq_length=seq_length, pad=pad)
        document_ids_S = np.full(seq_length, len(samples), np.int64)
        document_ids_S[: sum(sizes)] = np.repeat(np.arange(len(samples)), sizes)
        return whole._replace(document_ids_S=document_ids_S)

    @property
    def text_tokens(self) -> npt.NDArray[np.int64]:
        """Token ids before masking, without padding."""
        original_S = np.where(self.loss_mask_S > 0, self.labels_S, self.tokens_S)
        return original_S[self.padding_mask_S > 0]

    @classmethod
    def padded(
        cls,
        tokens: npt.NDArray[np.int64],
        types: npt.NDArray[np.int64],
        positions_P: npt.NDArray[np.int64],
        labels_P: npt.NDArray[np.int64],
        is_random: int,
        *,
        seq_length: int,
        pad: int,
    ) -> BertSample:
        """Build a padded sample from tokens, with labels at ``positions_P``."""
        size = len(tokens)
        tokens_S = np.full(seq_length, pad, np.int64)
        tokens_S[:size] = tokens
        types_S = np.zeros(seq_length, np.int64)
        types_S[:size] = types
        labels_S = np.full(seq_length, NO_LABEL, np.int64)
        labels_S[positions_P] = labels_P
        loss_mask_S = np.zeros(seq_length, np.float32)
        loss_mask_S[positions_P] = 1.0
        padding_mask_S = np.zeros(seq_length, np.int64)
        padding_mask_S[:size] = 1
        return cls(tokens_S, types_S, labels_S, is_random, loss_mask_S, padding_mask_S)


class BertBatch(NamedTuple):
    """Micro batch of BERT. The first six fields are Megatron's text, types, labels, is_random,
    loss_mask and padding_mask."""

    tokens_BS: Tensor
    """Input ids: segments with special tokens and some tokens replaced, then padding; int64."""
    types_BS: Tensor
    """0 for `[CLS] A [SEP]` and padding, 1 for `B [SEP]`; int64."""
    labels_BS: Tensor
    """Original token at predicted positions, -1 elsewhere; int64."""
    is_random_B: Tensor
    """1 if the second segment does not follow the first, else 0, also without pairs; int64."""
    loss_mask_BS: Tensor
    """1.0 at predicted positions, 0.0 elsewhere; float32."""
    padding_mask_BS: Tensor
    """1 for tokens, 0 for padding, which is excluded from attention; int64."""
    positions_BP: Tensor
    """Positions where loss_mask_BS is 1, ascending, filled up with positions where it is 0; int64.
    The head computes only these positions."""
    padded: bool = True
    """True if the batch contains padding."""
    position_ids_BS: Tensor | None = None
    """Position ids, int64; None if they are 0 to S - 1."""
    document_ids_BS: Tensor | None = None
    """Document ids, int64. Tokens attend only to tokens with the same id, and padding has a
    separate id. None if samples are not packed."""
    weights_2: Tensor | None = None
    """Loss weights as in a `GPTBatch`, for micro batches that differ in their numbers of samples
    and predicted tokens."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BertBatch:
        return mapped(self, Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def shortened(self, seq_length: int) -> BertBatch:
        """Return the batch with every sample cut to its first ``seq_length`` tokens."""
        assert self.tokens_BS.shape[1] >= seq_length
        cut = mapped(self, Tensor, lambda t: t[:, :seq_length].contiguous() if t.dim() == 2 else t)
        return cut._replace(positions_BP=predicted_positions(cut.loss_mask_BS))

    def lengthened(self, seq_length: int) -> BertBatch:
        """Return the batch unchanged. Pipelines never remove padding, because all micro batches
        must have the same shape."""
        assert self.tokens_BS.shape[1] == seq_length
        return self

    def without_padding(self, multiple: int) -> BertBatch:
        """Return the batch without the padding that all samples share. The length is rounded up to
        a multiple of ``multiple``."""
        longest = int(self.padding_mask_BS.sum(1).max())
        seq_length = -(-longest // multiple) * multiple
        return self.shortened(seq_length) if seq_length < self.tokens_BS.shape[1] else self


class T5Sample(NamedTuple):
    """T5 sample, padded to the two sequence lengths. The fields are those of `T5Batch`."""

    encoder_tokens_E: npt.NDArray[np.int64]
    decoder_tokens_D: npt.NDArray[np.int64]
    labels_D: npt.NDArray[np.int64]
    loss_mask_D: npt.NDArray[np.float32]
    encoder_padding_mask_E: npt.NDArray[np.int64]
    decoder_padding_mask_D: npt.NDArray[np.int64]

    @property
    def text_tokens(self) -> npt.NDArray[np.int64]:
        """Token ids of the encoder's input, without padding."""
        return self.encoder_tokens_E[self.encoder_padding_mask_E > 0]


class T5Batch(NamedTuple):
    """Micro batch of T5. Megatron names the first four fields text_enc, text_dec, labels and
    loss_mask. Its three square masks follow from the two padding masks, which are much smaller:
        enc_mask      encoder_padding_mask_BE[:, :, None] * encoder_padding_mask_BE[:, None, :]
        dec_mask      the same for the decoder, with later positions masked
        enc_dec_mask  decoder_padding_mask_BD[:, :, None] * encoder_padding_mask_BE[:, None, :]
    """

    encoder_tokens_BE: Tensor
    """Text with a sentinel in place of each span, then the end token; int64."""
    decoder_tokens_BD: Tensor
    """Start token, then the labels shifted by one; int64."""
    labels_BD: Tensor
    """Each sentinel followed by its span, then the end token; -1 at padding; int64."""
    loss_mask_BD: Tensor
    """1.0 for labels, 0.0 for padding; float32."""
    encoder_padding_mask_BE: Tensor
    """1 for tokens, 0 for padding; int64."""
    decoder_padding_mask_BD: Tensor
    """1 for tokens, 0 for padding; int64."""

    @classmethod
    def scoring(cls, texts: Sequence[ScoredText], lengths: tuple[int, int], start: int) -> T5Batch:
        """Build a batch that scores texts: the contexts are the encoder's input, and the
        continuations are the labels. ``lengths`` are the padded lengths of the encoder's and
        decoder's input, and ``start`` is the first token of the decoder's input."""
        contexts, labels = zip(*((text.context, text.continuation) for text in texts), strict=True)
        inputs = [np.concatenate(([start], row[:-1])) for row in labels]
        masks = [[np.ones_like(row) for row in rows] for rows in (contexts, labels)]
        encoder, decoder = lengths
        fields = (
            padded(contexts, encoder),
            padded(inputs, decoder),
            padded(labels, decoder, -1),
            padded(masks[1], decoder).astype(np.float32),
            padded(masks[0], encoder),
            padded(masks[1], decoder),
        )
        return cls._make(map(torch.from_numpy, fields))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> T5Batch:
        return T5Batch._make(tensor.to(device, non_blocking=non_blocking) for tensor in self)


def collate_bert(samples: Sequence[BertSample]) -> BertBatch:
    """Stack samples of equal length into a batch."""
    *fields, documents = zip(*samples, strict=True)
    tokens, types, labels, is_random, loss_mask, padding_mask = map(_stack, fields)
    positions = predicted_positions(loss_mask)
    batch = BertBatch(tokens, types, labels, is_random, loss_mask, padding_mask, positions)
    batch = batch._replace(padded=not bool(padding_mask.all()))
    if documents[0] is None:
        return batch
    document_ids_BS = _stack(documents)
    return batch._replace(
        document_ids_BS=document_ids_BS, position_ids_BS=positions_within(document_ids_BS)
    )


def predicted_positions(loss_mask_BS: Tensor) -> Tensor:
    """Return int64 [B, P]: for each sample, the predicted positions, ascending, filled up with
    other positions, so that P is the same for all samples."""
    most = positions_of(int(loss_mask_BS.count_nonzero(1).max()), loss_mask_BS.shape[1])
    order_BS = torch.argsort(loss_mask_BS, dim=1, descending=True, stable=True)
    return order_BS[:, :most].contiguous()


def positions_of(predictions: int, seq_length: int) -> int:
    """Return the number of positions per sample if each has at most ``predictions`` predicted
    ones."""
    multiple = _PREDICTIONS_MULTIPLE
    return min(max(1, -(-predictions // multiple)) * multiple, seq_length)


def collate_t5(samples: Sequence[T5Sample]) -> T5Batch:
    """Stack samples of equal lengths into a batch."""
    return T5Batch._make(map(_stack, zip(*samples, strict=True)))


def _stack(values: Sequence[np.ndarray | int]) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(value) for value in values]))


DOCUMENTS = 256
SENTENCES = 4
"""Maximum number of sentences in a mock document. The minimum is two, enough for a pair."""
MOST_SENTINELS = 100
SAMPLES = 2**16


class MockTokenizer(Tokenizer):
    """Tokenizer with all special tokens of BERT and T5. Missing ones are assigned to the highest
    ids of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        size, ids = tokenizer.vocab_size, dataclasses.asdict(tokenizer.special_ids)
        sentinels = ids.pop("sentinels")
        last = (i for i in range(size - 1, -1, -1) if i not in {*ids.values(), *sentinels})
        for name in ("cls", "sep", "pad", "mask", "eos"):
            if ids[name] is None:
                ids[name] = next(last)
        sentinels = sentinels or tuple(islice(last, min(MOST_SENTINELS, size // 4)))
        super().__init__("--mock-data", size, SpecialIds(**ids, sentinels=sentinels))
        special = [i for i in (*ids.values(), *sentinels) if i is not None]
        self.plain_ids: npt.NDArray[np.int64] = np.setdiff1d(np.arange(size), special)
        """Ids that are not special tokens, ascending."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.detokenize(ids)

    def save_pretrained(self, directory: str | Path) -> None:
        self.tokenizer.save_pretrained(directory)

    def _encode(self, text: str) -> TokenIds:
        return np.asarray(self.tokenizer.tokenize(text), np.int32)

    def _find_word_starts(self) -> WordStarts:
        return self.tokenizer.word_starts.copy()


class MockDocuments:
    """Mock documents of two to :data:`SENTENCES` sentences, determined by ``seed`` and ``part``.
    Each document counts upwards through ``ids_V`` from a random start, so that masked tokens and
    the sentence order are learned within a few steps. A document has ``tokens`` tokens on
    average."""

    prefix = "--mock-data"

    def __init__(self, ids_V: npt.NDArray[np.int64], tokens: int, seed: int, part: int) -> None:
        rng = np.random.default_rng([seed, part])
        counts_D = rng.integers(2, SENTENCES, DOCUMENTS, endpoint=True)
        self.document_indices = np.concatenate(([0], np.cumsum(counts_D)))
        shares_N = tokens / np.repeat(counts_D, counts_D)
        drawn_N = rng.uniform(0.5, 1.5, len(shares_N)) * shares_N
        self.sequence_lengths = np.maximum(drawn_N, 1).astype(np.int32)
        before_N = np.cumsum(self.sequence_lengths) - self.sequence_lengths
        first_D = rng.integers(len(ids_V), size=DOCUMENTS)
        in_document_N = before_N - np.repeat(before_N[self.document_indices[:-1]], counts_D)
        self._first_N = np.repeat(first_D, counts_D) + in_document_N
        self._ids_V = ids_V

    @cached_property
    def lengths_digest(self) -> str:
        return digest(self.sequence_lengths.data)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None, /) -> np.ndarray:
        index, stop = checked_range(self.sequence_lengths, index, offset, length, self.prefix)
        places = self._first_N[index] + np.arange(offset, stop)
        return self._ids_V[places % len(self._ids_V)]

    def verify(self) -> None:
        """Do nothing, because generated ids cannot be damaged."""


def mock_data(data: DataPipeline, num_samples: int, part: int) -> SampleDataset[Any]:
    """Implement `DataPipeline.mock` for families whose recipe is a :class:`SegmentRecipe`."""
    tokenizer = MockTokenizer(data.tokenizer)
    recipe = type(data)(data.config, tokenizer).recipe()
    assert isinstance(recipe, SegmentRecipe)
    return mock_samples(recipe, tokenizer, num_samples, part)


def mock_samples(
    recipe: SegmentRecipe[Any], tokenizer: MockTokenizer, num_samples: int, part: int
) -> SampleDataset[Any]:
    """Return mock samples of a recipe. ``part`` is 0 for training, 1 for validation and 2 for test.
    The samples repeat after :data:`SAMPLES`."""
    length = recipe.rules.max_tokens
    documents = MockDocuments(tokenizer.plain_ids, length, recipe.seed, part)
    units = range(recipe.units(documents))
    count = min(num_samples, SAMPLES)
    samples = recipe.build(documents, units, count, PARTS[part], IndexCache(None))
    return samples if count == num_samples else RepeatedSamples(samples, num_samples)
