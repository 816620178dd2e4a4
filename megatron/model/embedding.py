"""Input layers (token embedding and positions) and output head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.layer_list import LayerSpec, LayerState
from megatron.model.norm import build_norm
from megatron.model.rope import sinusoids
from megatron.parallel.layers import Dropout, VocabParallelEmbedding, WholeEmbedding
from megatron.parallel.loss_head import HeadInput, LossHead, Objective, Targets
from megatron.parallel.shard import initial
from megatron.parallel.tensor_parallel import TensorParallel

LM_LOSS = "lm loss"
"""Name of a language model head's loss."""

WORDS = "embedding.word_embeddings"
"""Canonical name of the token embedding."""


class TokenEmbedding(VocabParallelEmbedding):
    """Token embedding, and, if called with ``project``, the output head with the same weight.
    ``bias`` adds a bias to the logits. ``chunk_bytes`` is as in :class:`LossHead`."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        chunk_bytes: int | None,
        bias: bool = False,
    ) -> None:
        embedding, width = config.embedding, config.hidden_size
        self.input_scale = width**-0.5 if embedding.scale_head_input else None
        if embedding.logits_scaling is not None:
            self.input_scale = 1.0 / embedding.logits_scaling
        vocabulary, softcap = config.vocabulary, embedding.final_logit_softcapping
        assert vocabulary.size, "the vocabulary size is not known yet"
        super().__init__(
            vocabulary.padded,
            width,
            init=initial(config),
            head=LossHead(vocabulary.size, softcap, chunk_bytes, tp),
            bias=bias,
        )

    def forward(self, state: LayerState, project: bool = False) -> LayerState:  # type: ignore[override]
        """Embed token ids [B, S] as [B, S, H]. With ``project``, map hidden states [B, S, H] to
        this rank's logits [B, S, V / tensor size], or, if the state has targets, to the loss or to
        the results of the state's objective."""
        x = state.hidden
        if project and self.input_scale is not None:
            x = x * self.input_scale
        if project and state.objective is not None:
            objective = partial(_losses, state.objective, state.batch)
            outputs = super().forward(x, project, state.targets, objective)
        else:
            outputs = super().forward(x, project, state.targets)
        if isinstance(outputs, dict):
            for name, loss in outputs.items():
                state = state.with_loss(name, loss)
            return state
        if project and state.targets is not None:
            return state.with_loss(LM_LOSS, outputs)
        return state.with_hidden(outputs)


def _losses(
    objective: Objective,
    batch: Any,
    x_BPH: Tensor,
    weight_VH: Tensor,
    targets: Targets,
    head: LossHead,
    bias_V: Tensor | None,
) -> dict[str, Tensor]:
    return objective(HeadInput(x_BPH, weight_VH, bias_V, targets, head), batch)


def precise(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 if they are float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def vocabulary_layers(
    model: ModelConfig, parallel: ParallelConfig, tp: TensorParallel, head_bias: bool = False
) -> tuple[LayerSpec, LayerSpec]:
    """Return the first and the last layer of a language model: token embedding and output head, one
    module if their weights are tied."""
    chunk = parallel.logits_chunk_mib
    table = partial(TokenEmbedding, model, tp, None if chunk is None else chunk * 2**20)
    with_bias = partial(table, bias=True) if head_bias else table
    if model.embedding.tied:
        first = LayerSpec(WORDS, with_bias, "embed")
        return first, replace(first, forward=_project)
    return LayerSpec(WORDS, table), LayerSpec("output_layer", with_bias, forward=_project)


def word_embeddings(model: ModelConfig, tp: TensorParallel) -> LayerSpec:
    """Return the token embedding of a model without an output head over the vocabulary."""
    return LayerSpec(WORDS, partial(TokenEmbedding, model, tp, None))


def _project(table: nn.Module, state: LayerState) -> LayerState:
    return table(state, project=True)


class InputEmbedding(nn.Module):
    """Layer that turns token embeddings into the first block's input. It applies those of scale,
    position embeddings, token type embeddings and norm that the model has, then dropout."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, token_types: int = 0) -> None:
        super().__init__()
        positions = config.positions
        self.tp, self.offset = tp, positions.position_embedding_offset
        self.scale = config.embedding.embedding_multiplier
        if config.embedding.scale_embeddings:
            self.scale = config.hidden_size**0.5
        self.sinusoidal = positions.position_embedding_type == "sinusoidal"
        self.position_embeddings = None
        if positions.position_embedding_type == "learned_absolute":
            self.position_embeddings = WholeEmbedding(
                positions.max_position_embeddings + self.offset,
                config.hidden_size,
                init=initial(config),
                tp=tp,
            )
        self.tokentype_embeddings = None
        if token_types:
            init = initial(config)
            self.tokentype_embeddings = WholeEmbedding(
                token_types, config.hidden_size, init=init, tp=tp
            )
        self.norm = build_norm(config, tp) if config.norm.embed_layernorm else None
        self.widens = config.fp32_residual_connection
        self.dropout = Dropout(config.hidden_dropout, tp)

    def forward(self, state: LayerState) -> LayerState:
        """Map token embeddings [B, S, H] to the same shape."""
        x_BSH = state.hidden
        if state.noise is not None and self.training:
            assert state.dropout_seed is not None
            x_BSH = x_BSH + state.noise.drawn(x_BSH, state.dropout_seed, self.tp)
        if self.scale is not None:
            # The scale is rounded to the embeddings' dtype, as in Gemma's training.
            x_BSH = x_BSH * torch.full((), self.scale, dtype=x_BSH.dtype, device=x_BSH.device)
        if self.position_embeddings is not None or self.sinusoidal:
            positions = state.position_ids
            if positions is None:
                length = x_BSH.shape[1] * self.tp.slices
                positions = torch.arange(length, device=x_BSH.device)
            positions = positions + self.offset
            if self.position_embeddings is not None:
                x_BSH = x_BSH + self.position_embeddings(positions)
            else:
                own = self.tp.own(positions, dim=-1)
                x_BSH = x_BSH + sinusoids(own, x_BSH.shape[-1], x_BSH.dtype)
        if self.tokentype_embeddings is not None:
            x_BSH = x_BSH + self.tokentype_embeddings(state.token_types)
        if self.norm is not None:
            x_BSH = self.norm(x_BSH)
        if self.widens:
            x_BSH = x_BSH.to(torch.promote_types(x_BSH.dtype, torch.float32))
        return state.with_hidden(self.dropout(x_BSH))
