"""T5: its data, batches and model family. The encoder reads a text with sentinels in place of
spans, and the decoder predicts the spans.

    text      the quick brown fox jumps over the lazy dog
    encoder   the <extra_id_0> fox jumps <extra_id_1> lazy dog </s>
    decoder   <pad> <extra_id_0> quick brown <extra_id_1> over the
    labels    <extra_id_0> quick brown <extra_id_1> over the </s>

The numbers of corrupted tokens and of spans depend only on the length, as in Raffel et al. 2020
(arXiv:1910.10683, section 3.1.4) and their random_spans_noise_mask: every full sample has the same
lengths and needs the same number of sentinels. The span positions are drawn uniformly from all
positions that leave a token between two spans.

Shape suffixes: E tokens of the encoder's input, D of the decoder's, with padding; K spans.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.config import ModelConfig, ParallelConfig, RunConfig, Setting, Settings
from megatron.config.flags import ConfigError, build
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import SampleDataset, SampleView
from megatron.data.texts import ScoredText, check_lengths, fitted, too_long
from megatron.families.family import STREAM_FLAGS, BlockLengths, Family, GenerationSpec
from megatron.features.masked.batch import NO_LABEL, T5Batch, T5Sample, collate_t5, mock_data
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.flops import EncoderDecoderShape
from megatron.features.masked.layers import decoder_start, t5_layers
from megatron.features.masked.segments import SHORTEST, SegmentRecipe, SegmentRules
from megatron.model.attention_masks import AttentionMasks
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.loss_head import Targets
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.tokenizer.base import Tokenizer

logger = logging.getLogger(__name__)

_DECODER_MULTIPLE = 64


@dataclass(frozen=True)
class T5Recipe(SegmentRecipe[T5Sample]):
    """Recipe for T5's samples from documents, which may be split into sentences."""

    cache_name: ClassVar[str] = "t5"
    encoder_length: int
    """Number of tokens of the encoder's input, including padding."""
    decoder_length: int
    """Number of tokens of the decoder's input and of the labels, including padding."""
    seed: int
    short_seq_prob: float
    corruption: SpanCorruption
    end: int
    """Token at the end of the encoder's input and of the labels."""
    pad: int
    start: int
    """First token of the decoder's input."""
    sentinels: tuple[int, ...]
    vocabulary: int
    """Size of the vocabulary."""
    exact_epochs: int | None = None

    @classmethod
    def from_config(
        cls,
        config: MaskedDataConfig,
        tokenizer: Tokenizer,
        lengths: tuple[int, int | None],
        seed: int,
    ) -> T5Recipe:
        """Create the recipe from the flags. `lengths` are the sequence lengths of encoder and
        decoder (None for the default). Raises ConfigError if a flag's value is out of range or
        there are too few sentinels, and ValueError if the vocabulary lacks a special token."""
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
    """Number of corrupted tokens."""
    spans: int
    """Number of spans of corrupted tokens, each of which needs a sentinel."""
    encoder: int
    """Number of tokens of the encoder's input: uncorrupted tokens, sentinels and the end token."""
    decoder: int
    """Number of tokens of the decoder's input, which equals that of the labels."""


@dataclass(frozen=True)
class SpanCorruption:
    """Random choice of the spans to corrupt."""

    noise_density: float
    """Fraction of the tokens that are corrupted."""
    mean_span: float
    """Mean number of tokens of a span."""
    max_span: int
    """Maximum number of tokens of a span."""

    @classmethod
    def of(cls, config: MaskedDataConfig) -> SpanCorruption:
        """Create the rules from the flags. Raises ConfigError if a flag's value is out of range."""
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
        """Return the token and span counts for a text of `tokens` >= 1 tokens."""
        noise = min(max(1, round(tokens * self.noise_density)), max(1, tokens - 1))
        # A token must separate two spans, and no span may be longer than the maximum.
        spans = max(round(noise / self.mean_span), -(-noise // self.max_span), 1)
        spans = min(spans, noise, tokens - noise + 1)
        return SpanCounts(noise, spans, tokens - noise + spans + 1, noise + spans + 1)

    def most_tokens(self, encoder: int, decoder: int) -> int:
        """Return the largest text length for which this and all smaller lengths fit into inputs of
        ``encoder`` and ``decoder`` tokens, or 0 if none fits."""
        tokens = 0
        while True:
            needed = self.counts(tokens + 1)
            if needed.encoder > encoder or needed.decoder > decoder:
                return tokens
            tokens += 1

    def draw(
        self, tokens: int, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Draw the spans of a text of `tokens` tokens. Return the positions of their first tokens,
        ascending, and their lengths, int64[K] each."""
        noise, spans, _, _ = self.counts(tokens)
        sizes_K = self._sizes(noise, spans, rng)
        # Distribute the tokens that do not separate spans over the gaps and both ends.
        free = tokens - noise - (spans - 1)
        bars_K = np.sort(rng.choice(free + spans, spans, replace=False)).astype(np.int64)
        before_K = bars_K - np.arange(spans)  # free tokens before each span
        ends_K = np.cumsum(sizes_K)
        return before_K + np.arange(spans) + ends_K - sizes_K, sizes_K

    def _sizes(self, noise: int, spans: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Draw `spans` span lengths from 1 to max_span, if possible, whose sum is `noise`."""
        cuts = np.sort(rng.choice(noise - 1, spans - 1, replace=False)) + 1
        sizes_K = np.diff(cuts, prepend=0, append=noise).astype(np.int64)
        limit = max(self.max_span, -(-noise // spans))
        while (excess := int(np.maximum(sizes_K - limit, 0).sum())) > 0:
            # Move the excess, one token each, to random spans below the limit.
            np.minimum(sizes_K, limit, out=sizes_K)
            below = np.flatnonzero(sizes_K < limit)
            sizes_K[rng.choice(below, min(excess, len(below)), replace=False)] += 1
            rest = excess - min(excess, len(below))
            if rest:
                sizes_K[np.argmin(sizes_K)] += rest
        return sizes_K


def start_token(config: MaskedDataConfig, tokenizer: Tokenizer) -> int:
    """Return the first token of the decoder's input."""
    token: int = getattr(tokenizer, config.decoder_start_token)
    return token


def decoder_length(config: MaskedDataConfig, encoder: int) -> int:
    """Return the default of --decoder-seq-length for an encoder sequence length of `encoder`."""
    needed = _needed(SpanCorruption.of(config), encoder)
    return -(-needed // _DECODER_MULTIPLE) * _DECODER_MULTIPLE


def _needed(corruption: SpanCorruption, encoder: int) -> int:
    """Return the maximum number of labels for an encoder input of at most `encoder` tokens."""
    unlimited = int(2 * encoder / (1 - corruption.noise_density)) + _DECODER_MULTIPLE
    tokens = corruption.most_tokens(encoder, unlimited)
    return max((corruption.counts(n).decoder for n in range(1, tokens + 1)), default=1)


def begin(batch: T5Batch) -> LayerState:
    """Return the initial state of a micro batch, with the encoder's tokens. The decoder's tokens
    enter at a later layer. Their padding comes last, so the causal mask hides it."""
    return LayerState(
        hidden=batch.encoder_tokens_BE,
        masks=AttentionMasks(padding_BT=batch.encoder_padding_mask_BE == 0),
        targets=Targets(batch.labels_BD, batch.loss_mask_BD),
        batch=batch,
    )


class _DecoderTokens(NamedTuple):
    """Stand-in for a batch, from which the decoder's first layer reads its input."""

    decoder_tokens_BD: Tensor


def _continue(tokens_1S: Tensor, positions_1S: Tensor, cache: LayerCache) -> LayerState:
    batch = _DecoderTokens(tokens_1S)
    return LayerState(tokens_1S, position_ids=positions_1S, cache=cache, batch=batch)


def travels(
    model: ModelConfig, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that cross a pipeline stage boundary: the encoder's hidden
    states [B, E / parts, H] or, in the decoder, its hidden states [B, D / parts, H] and the
    encoder's output, which is all that crosses between the two."""
    parts = tp.slices * tp.context.size

    def shape(tokens_BS: Tensor) -> tuple[int, ...]:
        samples, length = tokens_BS.shape
        assert length % parts == 0
        return samples, length // parts, model.hidden_size

    encoded = shape(state.batch.encoder_tokens_BE)
    start = decoder_start(model)
    shapes = {"hidden" if index < start else "encoder": encoded}
    return shapes if index <= start else {"hidden": shape(state.batch.decoder_tokens_BD), **shapes}


class T5Data(DataPipeline):
    """Data pipeline of T5."""

    flags = frozenset({"masked_data"})
    unit = "sentence"

    def recipe(self) -> T5Recipe:
        config = self.config.section(MaskedDataConfig)
        decoder = self.config.model.decoder_seq_length
        recipe = T5Recipe.from_config(config, self.tokenizer, (self.seq_length, decoder), self.seed)
        return dataclasses.replace(
            recipe, exact_epochs=self.config.data.train_data_exact_num_epochs
        )

    def collator(self) -> Callable[[Sequence[T5Sample]], T5Batch]:
        return collate_t5

    def mock(self, num_samples: int, part: int) -> SampleDataset[T5Sample]:
        return mock_data(self, num_samples, part)

    def view(self, sample: T5Sample, length: int) -> SampleView:
        """Implement `DataPipeline.view`. The text shows the encoder's input and the labels. Tokens
        and loss mask are the decoder's."""
        batch = self.collator()([sample])

        def text(tokens: Any, mask: Any) -> str:
            return self.tokenizer.detokenize(tokens[0][mask[0] > 0].tolist())

        encoder = text(batch.encoder_tokens_BE, batch.encoder_padding_mask_BE)
        labels = text(batch.labels_BD, batch.decoder_padding_mask_BD)
        return SampleView(
            batch.decoder_tokens_BD[0].numpy(),
            batch.loss_mask_BD[0].numpy(),
            f"[[{encoder}]]\n{labels}",
        )


class T5(Family):
    name = "t5"
    tokenizer_type = "BertWordPieceLowerCase"
    generates = True
    context_reader = "encoder"
    unused_flags = STREAM_FLAGS | {
        "bert_binary_head", "num_tokentypes", "lm_head_activation",
        "bert_pair_task", "whole_word_masking", "max_preds_per_seq", "eval_max_preds_per_seq",
        "max_ngrams", "favor_longer_ngram", "bert_packing",
    }  # fmt: skip

    def complete_settings(self, settings: Settings) -> Settings:
        completed = {"encoder_decoder": Setting(True, f"family {self.name}")}
        encoder = settings.get("encoder_seq_length") or settings.get("seq_length")
        if "decoder_seq_length" not in settings and encoder is not None:
            length = decoder_length(build(MaskedDataConfig, settings), encoder.value)
            how = "derived: the most that an encoder input can need"
            completed["decoder_seq_length"] = Setting(length, how)
        return settings | completed

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        layers = partial(t5_layers, model, parallel)
        return ModelSpec(layers, begin, partial(travels, model))

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        assert model.decoder_num_layers is not None and model.decoder_seq_length is not None
        encoder = super().shape(model, run)
        decoder = dataclasses.replace(
            encoder,
            num_layers=model.decoder_num_layers,
            seq_length=model.decoder_seq_length,
            windows=tuple(map(model.attention.window, range(model.decoder_num_layers))),
        )
        return EncoderDecoderShape(**vars(encoder) | {"sees_later": True}, decoder=decoder)

    def block_lengths(self, model: ModelConfig) -> tuple[BlockLengths, ...]:
        encoded, decoded = model.seq_length, model.decoder_seq_length
        assert model.decoder_num_layers is not None and decoded is not None
        encoder = (BlockLengths(encoded),) * model.num_layers
        return encoder + (BlockLengths(decoded, encoded),) * model.decoder_num_layers

    def generation(self, config: RunConfig, tokenizer: Tokenizer | None) -> GenerationSpec:
        assert tokenizer is not None
        longest = config.model.positions.max_position_embeddings
        start = start_token(config.section(MaskedDataConfig), tokenizer)
        return GenerationSpec(_continue, longest, decoder_start(config.model), longest, start)

    def answered(
        self, model: ModelConfig, tokenizer: Tokenizer, prompt: str, answer: str
    ) -> ScoredText:
        """Return a text to score: the encoder reads the prompt, and the decoder predicts the
        answer. Each ends with the end-of-sequence token. A long prompt is truncated at its end; a
        long answer raises an error."""
        assert model.decoder_seq_length is not None
        asked, said = tokenizer.tokenize_sentences([prompt, answer])
        if len(said) >= model.decoder_seq_length:
            flag = "--decoder-seq-length"
            raise too_long(answer, len(said) + 1, model.decoder_seq_length, flag)
        eos = tokenizer.eos
        return ScoredText(np.append(asked[: model.seq_length - 1], eos), np.append(said, eos))

    def scored_lengths(
        self, config: RunConfig, texts: Sequence[ScoredText]
    ) -> npt.NDArray[np.int64]:
        pairs = [(len(text.context), len(text.continuation)) for text in texts]
        lengths = np.array(pairs, np.int64)
        check_lengths(lengths, config.model.positions.longest)
        return lengths

    def scored_batch(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        texts: Sequence[ScoredText],
        pad_to: tuple[int, int] | None = None,
    ) -> T5Batch:
        needed = self.scored_lengths(config, texts).max(0).tolist()
        longest = config.model.positions.longest
        encoder, decoder = (
            fitted(wanted, least, longest)
            for wanted, least in zip(pad_to or (None, None), needed, strict=True)
        )
        start = start_token(config.section(MaskedDataConfig), tokenizer)
        return T5Batch.scoring(texts, (encoder, decoder), start)

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> T5Data:
        return T5Data(config, tokenizer)


FAMILY = T5()
