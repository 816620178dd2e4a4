"""BERT: an encoder that predicts masked tokens, and whether two segments belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.config.features import DOCUMENTS
from megatron.config.model import HEADS
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import SampleDataset, SampleView
from megatron.data.texts import LabelledBatch
from megatron.families.family import STREAM_FLAGS, Family
from megatron.features.masked.bert_layers import SOP_LOSS, bert_layers
from megatron.features.masked.bert_samples import BertRecipe
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.masked_batch import (
    BertBatch,
    BertSample,
    collate_bert,
    positions_of,
)
from megatron.features.masked.mock import mock_data
from megatron.model.attention_flex import block_masks
from megatron.model.attention_masks import AttentionMasks, narrows
from megatron.model.embedding import LM_LOSS, WORDS
from megatron.model.flops import TransformerShape
from megatron.model.heads import HEAD_NAMES, head_flops
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec, only_hidden_travels
from megatron.parallel.loss_head import Targets
from megatron.tokenizer import Tokenizer

HEAD_PARTS = (
    "pooler.", "binary_head.", "lm_head.", "output_layer.", f"{WORDS}.bias",
    *(f"{name}." for name in HEAD_NAMES.values()),
)  # fmt: skip


def begin(model: ModelConfig, batch: BertBatch) -> LayerState:
    """The initial state of a micro batch."""
    return LayerState(
        hidden=batch.tokens_BS,
        token_types=batch.types_BS,
        position_ids=batch.position_ids_BS,
        masks=masks(model, batch, batch.document_ids_BS),
        targets=Targets(batch.labels_BS, batch.loss_mask_BS),
        batch=batch,
    )


def begin_labelled(model: ModelConfig, batch: LabelledBatch) -> LayerState:
    """The initial state of a micro batch of labelled texts."""
    return LayerState(
        hidden=batch.tokens_BS,
        token_types=batch.types_BS,
        masks=masks(model, batch),
        targets=Targets(batch.labels_B, torch.ones_like(batch.labels_B)),
        batch=batch,
    )


def masks(
    model: ModelConfig, batch: BertBatch | LabelledBatch, documents_BS: Tensor | None = None
) -> AttentionMasks:
    """Attention to all tokens but padding, or within packed samples. Kernels run without a mask
    where a micro batch has no padding, which its collator knows: no device is asked."""
    tokens_BS = batch.tokens_BS
    if documents_BS is None and batch.padded:
        documents_BS = batch.padding_mask_BS
    blocks = block_masks(model, tokens_BS, documents_BS, causal=False)
    windows = any(narrows(window, tokens_BS.shape[1], causal=False) for window in model.windows)
    if documents_BS is batch.padding_mask_BS and not (blocks or windows):
        # One mask of keys for all queries, instead of one for each.
        return AttentionMasks(padding_BT=documents_BS == 0, causal=False)
    return AttentionMasks(documents_BS, blocks=blocks, causal=False)


class BertData(DataPipeline):
    """The data of a BERT's run: sentences, or TFRecords that are masked already."""

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
        """See `DataPipeline.view`; each input comes before the text to predict for it, and packed
        samples are on lines of their own."""
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
