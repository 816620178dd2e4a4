"""The first layers: token embedding and positions."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.model.layer_list import LayerState
from megatron.model.norm import build_norm
from megatron.parallel.cross_entropy import LossHead
from megatron.parallel.layers import Dropout, PositionEmbedding, VocabParallelEmbedding
from megatron.parallel.shard import Init
from megatron.parallel.tensor_parallel import TensorParallel

LM_LOSS = "lm loss"
"""Name of the loss of a language model's head."""


class TokenEmbedding(VocabParallelEmbedding):
    """The token embedding; with ``project`` the output head with the same weight. ``chunk_bytes``
    is as in :class:`LossHead`."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, chunk_bytes: int | None) -> None:
        embedding, width = config.embedding, config.hidden_size
        self.input_scale = width**-0.5 if embedding.scale_head_input else None
        vocabulary, softcap = config.vocabulary, embedding.final_logit_softcapping
        assert vocabulary.size, "the vocabulary size is not known yet"
        super().__init__(
            vocabulary.padded,
            width,
            init=Init(config.init_method_std),
            head=LossHead(vocabulary.size, softcap, chunk_bytes, tp),
        )

    def forward(self, state: LayerState, project: bool = False) -> LayerState:  # type: ignore[override]
        """Token ids [B, S] to [B, S, H]; with ``project`` hidden states [B, S, H] to this rank's
        logits [B, S, V / tensor size], or, where the state has targets, to a loss."""
        x = state.hidden
        if project and self.input_scale is not None:
            x = x * self.input_scale
        found = super().forward(x, project, state.targets)
        if project and state.targets is not None:
            return state.with_loss(LM_LOSS, found)
        return state.with_hidden(found)


class InputEmbedding(nn.Module):
    """From embeddings to the input of the first block: scale, learned positions and norm, as far as
    the model has them, then dropout."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        positions = config.positions
        self.tp, self.offset = tp, positions.position_embedding_offset
        self.scale = config.hidden_size**0.5 if config.embedding.scale_embeddings else None
        self.position_embeddings = None
        if positions.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(
                positions.max_position_embeddings + self.offset,
                config.hidden_size,
                init=Init(config.init_method_std),
                tp=tp,
            )
        self.norm = build_norm(config, tp) if config.norm.embed_layernorm else None
        self.dropout = Dropout(config.hidden_dropout, tp)

    def forward(self, state: LayerState) -> LayerState:
        """[B, S, H] to [B, S, H]."""
        x_BSH = state.hidden
        if self.scale is not None:
            # Rounded to the dtype of the embeddings, as Gemma is trained.
            x_BSH = x_BSH * torch.full((), self.scale, dtype=x_BSH.dtype, device=x_BSH.device)
        if self.position_embeddings is not None:
            positions = state.position_ids
            if positions is None:
                length = x_BSH.shape[1] * self.tp.slices
                positions = torch.arange(length, device=x_BSH.device)
            x_BSH = x_BSH + self.position_embeddings(positions + self.offset)
        if self.norm is not None:
            x_BSH = self.norm(x_BSH)
        return state.with_hidden(self.dropout(x_BSH))
