"""Bi-encoder family: one or two BERTs that embed queries and the contexts that answer them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from megatron.config import ModelConfig, ParallelConfig, RunConfig
from megatron.families.family import STREAM_FLAGS, BlockLengths, Family
from megatron.features.retrieval.flags import FAMILY as NAME
from megatron.features.retrieval.flags import BiencoderConfig
from megatron.features.retrieval.layers import (
    CONTEXT,
    PROJECTION,
    QUERY,
    SHARED,
    begin,
    biencoder_layers,
    encoder_layers,
    losses_of,
    rows_state,
    travels,
)
from megatron.features.retrieval.samples import IctData
from megatron.model.flops import TransformerShape
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure, ModelSpec, only_hidden_travels
from megatron.tokenizer import Tokenizer


class Biencoder(Family):
    name = NAME
    tokenizer_type = "BertWordPieceLowerCase"
    unused_flags = STREAM_FLAGS | {
        "bert_binary_head", "lm_head_activation", "lm_head_bias", "train_data_exact_num_epochs",
        "untie_embeddings_and_output_weights",
    }  # fmt: skip

    def spec(self, model: ModelConfig, parallel: ParallelConfig) -> ModelSpec:
        losses = losses_of(model)
        return ModelSpec(
            partial(biencoder_layers, model, parallel),
            partial(begin, model),
            partial(travels, model),
            losses,
            attention="full",
            added_parts=frozenset({PROJECTION}),
            no_perplexity=frozenset(losses),
        )

    def shape(self, model: ModelConfig, run: RunConfig | None = None) -> TransformerShape:
        shape, part = TransformerShape.of(model), model.part(BiencoderConfig)
        return replace(
            shape,
            num_layers=2 * shape.num_layers,
            windows=2 * shape.windows,
            sees_later=True,
            predictions=0,
            other=4.0 * model.hidden_size * part.biencoder_projection_dim,
        )

    def block_lengths(self, model: ModelConfig) -> tuple[BlockLengths, ...]:
        length = model.seq_length
        if model.part(BiencoderConfig).biencoder_shared_query_context_model:
            return (BlockLengths(2 * length, seen=length),) * model.num_layers
        return (BlockLengths(length),) * (2 * model.num_layers)

    def data(self, config: RunConfig, tokenizer: Tokenizer) -> IctData:
        return IctData(config, tokenizer)


def _vectors(state: LayerState, batch: Any) -> Mapping[str, Tensor]:
    return {"vector": state.hidden[:, 0]}


VECTORS = Measure(("vector",), _vectors, ends="logits", per_sample=True)
"""Measure that yields the embedding of each text, [B, D], for a model built with
:func:`encoder_spec`."""


def encoder_spec(model: ModelConfig, parallel: ParallelConfig, queries: bool) -> ModelSpec:
    """Return the specification of one encoder, for ``queries`` or for contexts, without the other.
    Its parameters have the same names as in the bi-encoder."""
    shared = model.part(BiencoderConfig).biencoder_shared_query_context_model
    name = SHARED if shared else QUERY if queries else CONTEXT

    def start(batch: Any) -> LayerState:
        return rows_state(model, batch, batch)

    crossing = partial(only_hidden_travels, model.hidden_size)
    layers = partial(encoder_layers, model, parallel, name)
    return ModelSpec(layers, start, crossing, attention="full")


FAMILY = Biencoder()
