"""BERT: its data, batches and model family. Samples are `[CLS] A [SEP] B [SEP]` with some words
masked, and a label that says whether B follows A.

Single words or a few consecutive ones are chosen at random until a fraction of the tokens is
reached. Of the chosen tokens, 80 % become the mask token, 10 % a random token, and 10 % are
unchanged (Devlin et al. 2018, arXiv:1810.04805, section 3.1). The probabilities of n consecutive
words are those of Lan et al. 2019, arXiv:1909.11942, section 3.1, as in Megatron.

Shape suffixes: S tokens of a sample, P predicted tokens, W words, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.config.features import DOCUMENTS
from megatron.config.flags import ConfigError
from megatron.config.model import HEADS
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import SampleDataset, SampleView
from megatron.families.family import STREAM_FLAGS, Family
from megatron.features.masked.batch import (
    BertBatch,
    BertSample,
    collate_bert,
    mock_data,
    positions_of,
)
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.heads import HEAD_NAMES, LabelledBatch, head_flops
from megatron.features.masked.layers import SOP_LOSS, bert_layers
from megatron.features.masked.segments import Pairs, SegmentRecipe, SegmentRules
from megatron.model.attention_flex import block_masks
from megatron.model.attention_masks import AttentionMasks, narrows
from megatron.model.embedding import LM_LOSS, WORDS
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec, only_hidden_travels
from megatron.parallel.loss_head import Targets
from megatron.tokenizer.base import Tokenizer

MASKED, RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class BertRecipe(SegmentRecipe[BertSample]):
    """Recipe for BERT's samples from documents that are split into sentences. With pairs, documents
    of fewer than two sentences are left out."""

    cache_name: ClassVar[str] = "bert"
    seq_length: int
    """Number of tokens of a sample, including padding."""
    seed: int
    pairs: Pairs
    short_seq_prob: float
    cls: int
    sep: int
    pad: int
    masking: WordMasking
    packs: bool = False
    exact_epochs: int | None = None

    @classmethod
    def from_config(
        cls,
        config: MaskedDataConfig,
        tokenizer: Tokenizer,
        seq_length: int,
        seed: int,
        binary_head: bool = True,
    ) -> BertRecipe:
        """Create the recipe from the flags. Samples have no pairs without a binary head. Raises
        ConfigError if a flag's value is out of range, and ValueError if the vocabulary lacks a
        special token."""
        config.check_shares()
        pairs = cast(Pairs, config.bert_pair_task if binary_head else "none")
        if not binary_head and config.bert_pair_task != MaskedDataConfig.bert_pair_task:
            raise ConfigError(
                f"--bert-pair-task {config.bert_pair_task} is the task of the second head, which "
                "--bert-no-binary-head leaves out: give one of them"
            )
        if config.max_ngrams < 1:
            raise ConfigError(f"--max-ngrams {config.max_ngrams} must be at least 1")
        if config.bert_packing and binary_head:
            raise ConfigError(
                "--bert-packing puts several samples into a sequence, whose second head predicts "
                "for one: add --bert-no-binary-head"
            )
        shortest = 5 if binary_head else 4
        if seq_length < shortest:
            raise ConfigError(
                f"--seq-length {seq_length} must be at least {shortest}: the special tokens and "
                "two others"
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
        special = tokenizer.cls, tokenizer.sep, tokenizer.pad
        chance = config.short_seq_prob
        return cls(seq_length, seed, pairs, chance, *special, masking, config.bert_packing)

    @property
    def vocab_size(self) -> int:
        return self.masking.vocab_size

    @property
    def rules(self) -> SegmentRules:
        special = 2 if self.pairs == "none" else 3
        return SegmentRules(self.seq_length - special, self.short_seq_prob, self.pairs)

    @property
    def capacity(self) -> int | None:
        return self.seq_length if self.packs else None

    def packed(self, samples: Sequence[BertSample]) -> BertSample:
        return BertSample.packed(samples, pad=self.pad)

    def sample(
        self, texts: Sequence[npt.NDArray[np.int64]], is_random: bool, rng: np.random.Generator
    ) -> BertSample:
        tokens = [np.array([self.cls])]
        segments = []
        for text in texts:
            start = sum(map(len, tokens))
            tokens += [text, np.array([self.sep])]
            segments.append(range(start, start + len(text)))
        original = np.concatenate(tokens)
        chosen_P = self.masking.choose(original, segments, rng)
        replaced = self.masking.replace(original, chosen_P, rng)
        types = (np.arange(len(original)) > segments[0].stop).astype(np.int64)
        return BertSample.padded(
            replaced,
            types,
            chosen_P,
            original[chosen_P],
            int(is_random),
            seq_length=self.seq_length,
            pad=self.pad,
        )


@dataclass(frozen=True)
class WordMasking:
    """Choice and replacement of the predicted tokens."""

    mask_prob: float
    """Fraction of a sample's tokens, including special tokens, that are predicted."""
    max_predictions: int
    """Maximum number of predicted tokens per sample."""
    max_ngrams: int
    """Maximum number of consecutive words that are chosen together."""
    favor_longer: bool
    """True if longer n-grams are more likely than shorter ones."""
    mask_token: int
    vocab_size: int
    """Size of the vocabulary from which random tokens are drawn."""
    word_starts_V: npt.NDArray[np.bool_] | None = field(compare=False, repr=False)
    """True for tokens that begin a word. None masks tokens individually."""

    @cached_property
    def ngram_chances(self) -> npt.NDArray[np.float64]:
        """Probabilities of n-grams of 1, 2, ... `max_ngrams` words."""
        chances = 1.0 / np.arange(1, self.max_ngrams + 1)
        return (chances[::-1] if self.favor_longer else chances) / chances.sum()

    def choose(
        self, tokens_S: npt.NDArray[np.int64], segments: Sequence[range], rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """Choose the positions to predict, ascending, int64[P]. At least one is chosen, unless
        every word has more tokens than `max_predictions`. `segments` are the position ranges that
        contain words. Other positions are special tokens, which are never chosen."""
        starts_W, stops_W, words_left_W = self._words(tokens_S, segments)
        sizes_W = (stops_W - starts_W).tolist()
        wanted = max(1, round(len(tokens_S) * self.mask_prob))
        left = min(self.max_predictions, wanted)
        # Draw n-gram lengths for all words at once, by inverse transform sampling.
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
            # more than the wanted fraction, but the shortest word
            chosen_W[sizes_W.index(min(sizes_W))] = 1
        words = np.flatnonzero(np.frombuffer(chosen_W, np.uint8))
        ranges = [np.arange(starts_W[word], stops_W[word]) for word in words]
        return np.concatenate(ranges) if ranges else np.empty(0, np.int64)

    def replace(
        self, tokens_S: npt.NDArray[np.int64], chosen_P: np.ndarray, rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """Return the tokens with the chosen ones masked, replaced by random ones, or unchanged."""
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
        """Return the start and stop position of each word, and the number of words from there to
        the end of its segment."""
        starts, stops, words_left = [], [], []
        for segment in segments:
            assert segment, "a segment has tokens"
            if self.word_starts_V is None:
                start = np.arange(segment.start, segment.stop)
            else:
                begins = self.word_starts_V[tokens_S[segment.start : segment.stop]].copy()
                # A segment always begins with a word, even if its first word is cut.
                begins[:1] = True
                start = segment.start + np.flatnonzero(begins)
            starts.append(start)
            stops.append(np.append(start[1:], segment.stop))
            words_left.append(np.arange(len(start), 0, -1))
        return np.concatenate(starts), np.concatenate(stops), np.concatenate(words_left)


HEAD_PARTS = (
    "pooler.", "binary_head.", "lm_head.", "output_layer.", f"{WORDS}.bias",
    *(f"{name}." for name in HEAD_NAMES.values()),
)  # fmt: skip


def begin(model: ModelConfig, batch: BertBatch) -> LayerState:
    """Return the initial state of a micro batch."""
    targets = Targets(batch.labels_BS, batch.loss_mask_BS)
    return LayerState(
        hidden=batch.tokens_BS,
        token_types=batch.types_BS,
        position_ids=batch.position_ids_BS,
        masks=masks(model, batch, batch.document_ids_BS),
        targets=targets.at(batch.positions_BP)._replace(positions_BP=batch.positions_BP),
        batch=batch,
    )


def begin_labelled(model: ModelConfig, batch: LabelledBatch) -> LayerState:
    """Return the initial state of a micro batch of labelled texts."""
    return LayerState(
        hidden=batch.tokens_BS,
        token_types=batch.types_BS,
        masks=masks(model, batch),
        targets=Targets(batch.labels_B, torch.ones_like(batch.labels_B), of_samples=True),
        batch=batch,
    )


def masks(
    model: ModelConfig, batch: BertBatch | LabelledBatch, documents_BS: Tensor | None = None
) -> AttentionMasks:
    """Return masks that exclude padding from attention, or restrict it to each packed sample. If
    the collator recorded that a micro batch has no padding, kernels run without a mask; checking
    the mask here would synchronize."""
    tokens_BS = batch.tokens_BS
    if documents_BS is None and batch.padded:
        documents_BS = batch.padding_mask_BS
    blocks = block_masks(model, tokens_BS, documents_BS, causal=False)
    windows = any(narrows(window, tokens_BS.shape[1], causal=False) for window in model.windows)
    if documents_BS is batch.padding_mask_BS and not (blocks or windows):
        # All queries share a single mask over keys.
        return AttentionMasks(padding_BT=documents_BS == 0, causal=False)
    return AttentionMasks(documents_BS, blocks=blocks, causal=False)


class BertData(DataPipeline):
    """Data pipeline of BERT, for documents split into sentences, or TFRecords of masked samples."""

    takes = frozenset({DOCUMENTS, "masked"})
    flags = frozenset({"masked_data"})
    unit = "sentence"

    def recipe(self) -> BertRecipe:
        config = self.config.section(MaskedDataConfig)
        paired = self.config.model.bert_binary_head
        recipe = BertRecipe.from_config(config, self.tokenizer, self.seq_length, self.seed, paired)
        return replace(recipe, exact_epochs=self.config.data.train_data_exact_num_epochs)

    def collator(self) -> Callable[[Sequence[BertSample]], BertBatch]:
        return collate_bert

    def mock(self, num_samples: int, part: int) -> SampleDataset[BertSample]:
        return mock_data(self, num_samples, part)

    def view(self, sample: BertSample, length: int) -> SampleView:
        """Implement `DataPipeline.view`. Each masked input is followed by the original text, and
        packed samples are on separate lines."""
        batch = self.collator()([sample])
        tokens_S, labels_S, loss_mask_S, padding_mask_S = (
            values[0, :length].numpy()
            for values in (
                batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.padding_mask_BS
            )
        )  # fmt: skip
        document_ids_S = np.zeros(length, np.int64)
        if batch.document_ids_BS is not None:
            document_ids_S = batch.document_ids_BS[0, :length].numpy()
        parts: dict[int, list[str]] = {}
        for (document, predicted), group in groupby(
            range(int(padding_mask_S.sum())),
            key=lambda place: (int(document_ids_S[place]), bool(loss_mask_S[place])),
        ):
            places = list(group)
            text = self.tokenizer.detokenize(tokens_S[places].tolist())
            label = self.tokenizer.detokenize(labels_S[places].tolist()) if predicted else ""
            words = f"{text} -> {label}" if predicted else f"[[{text}]]"
            parts.setdefault(document, []).append(words)
        kind = "random" if int(batch.is_random_B[0]) else "in order"
        text = "\n".join(" ".join(words) for words in parts.values())
        return SampleView(tokens_S, loss_mask_S, f"({kind}) {text}")


class BERT(Family):
    name = "bert"
    tokenizer_type = "BertWordPieceLowerCase"
    head_states = 3
    heads = frozenset(HEADS) - {"reward"}
    unused_flags = STREAM_FLAGS | {
        "lm_head_bias",
        "mean_noise_span_length",
        "max_noise_span_length",
        "decoder_start_token",
    }

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        pretrains = model.head == "lm"
        paired = pretrains and model.bert_binary_head
        losses = (LM_LOSS, SOP_LOSS) if paired else (LM_LOSS,)
        return ModelSpec(
            partial(bert_layers, model, parallel),
            partial(begin if pretrains else begin_labelled, model),
            partial(only_hidden_travels, model.hidden_size),
            dict.fromkeys(losses, 1.0),
            attention="full",
            head_parts=HEAD_PARTS,
        )

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        shape = replace(TransformerShape.of(model), sees_later=True)
        width = model.hidden_size
        if model.head != "lm":
            return replace(shape, predictions=0, other=head_flops(model))
        masked = MaskedDataConfig() if run is None else run.section(MaskedDataConfig)
        chosen = round(masked.mask_prob * model.seq_length)
        chosen = min(chosen, masked.max_predictions(model.seq_length))
        predictions = positions_of(chosen, model.seq_length)
        other = 2.0 * predictions * width**2
        if model.bert_binary_head:
            other += 2.0 * width**2 + 4.0 * width
        return replace(shape, predictions=predictions, other=other)

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> BertData:
        assert config.model.head == "lm", "labelled text comes from a task, not from a corpus"
        return BertData(config, tokenizer)


FAMILY = BERT()
