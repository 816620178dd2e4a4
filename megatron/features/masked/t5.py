"""T5: an encoder, and a decoder that fills the gaps in the encoder's text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.config import ModelConfig, ParallelConfig, RunConfig, Setting, Settings
from megatron.config.flags import build
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import SampleDataset, SampleView
from megatron.data.texts import ScoredText, check_lengths, fitted, too_long
from megatron.families.family import (
    STREAM_FLAGS,
    BlockLengths,
    Family,
    GenerationSpec,
)
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.masked_batch import (
    T5Batch,
    T5Sample,
    collate_t5,
)
from megatron.features.masked.mock import mock_data
from megatron.features.masked.t5_layers import decoder_start, t5_layers
from megatron.features.masked.t5_samples import (
    T5Recipe,
    decoder_length,
    start_token,
)
from megatron.model.attention_masks import AttentionMasks
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerCache, LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.loss_head import Targets
from megatron.parallel.tensor_parallel import TensorParallel
from megatron.tokenizer import Tokenizer


def begin(batch: T5Batch) -> LayerState:
    """The initial state of a micro batch: the encoder's tokens; the decoder's come in the middle.
    Padding follows the decoder's tokens, so that they do not see it."""
    return LayerState(
        hidden=batch.encoder_tokens_BE,
        masks=AttentionMasks(padding_BT=batch.encoder_padding_mask_BE == 0),
        targets=Targets(batch.labels_BD, batch.loss_mask_BD),
        batch=batch,
    )


class _DecoderTokens(NamedTuple):
    """What the decoder's first layer takes of a batch."""

    decoder_tokens_BD: Tensor


def _continue(tokens_1S: Tensor, positions_1S: Tensor, cache: LayerCache) -> LayerState:
    batch = _DecoderTokens(tokens_1S)
    return LayerState(tokens_1S, position_ids=positions_1S, cache=cache, batch=batch)


def travels(
    model: ModelConfig, state: LayerState, tp: TensorParallel, index: int
) -> dict[str, tuple[int, ...]]:
    """What crosses a stage boundary: hidden states [B, E / slices, H] of the encoder; behind its
    end those of the decoder, [B, D / slices, H], and the encoder's output."""

    def shape(tokens_BS: Tensor) -> tuple[int, ...]:
        samples, length = tokens_BS.shape
        assert length % tp.slices == 0
        return samples, length // tp.slices, model.hidden_size

    encoded = shape(state.batch.encoder_tokens_BE)
    if index <= decoder_start(model):
        return {"hidden": encoded}
    return {"hidden": shape(state.batch.decoder_tokens_BD), "encoder": encoded}


class T5Data(DataPipeline):
    """The data of a T5's run."""

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
        """See `DataPipeline.view`: the encoder's input, without a loss, and the text to predict.
        Tokens and loss mask are those of the decoder."""
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
        "bert_binary_head", "num_tokentypes", "lm_head_activation", "bert_pair_task",
        "whole_word_masking", "max_preds_per_seq", "eval_max_preds_per_seq", "max_ngrams",
        "favor_longer_ngram", "bert_packing",
    }  # fmt: skip

    def complete_settings(self, settings: Settings) -> Settings:
        found = {"encoder_decoder": Setting(True, f"family {self.name}")}
        encoder = settings.get("encoder_seq_length") or settings.get("seq_length")
        if "decoder_seq_length" not in settings and encoder is not None:
            length = decoder_length(build(MaskedDataConfig, settings), encoder.value)
            how = "derived: the most that an encoder input can need"
            found["decoder_seq_length"] = Setting(length, how)
        return settings | found

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
        return dataclasses.replace(encoder, sees_later=True, decoder=decoder)

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
        """The encoder reads the prompt, the decoder answers; both end with the end-of-sequence
        token. The end of a prompt that is too long is left out."""
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
