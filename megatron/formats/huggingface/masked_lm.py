"""What BERTs do in `transformers`: predict masked tokens, and whether two segments are a pair."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.source import Source
from megatron.config import ModelConfig
from megatron.families import family_of, spec_of
from megatron.formats.huggingface.tasks import Inputs, Task, compared_length
from megatron.model.layer_list import LayerState


class MaskedLM(Task):
    """An encoder that predicts masked tokens, and with its second head whether two segments belong
    together."""

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Two samples of two segments; the second is padded."""
        length, last = compared_length(model), model.positions.max_position_embeddings
        random = torch.Generator().manual_seed(seed)
        tokens_BS = torch.randint(model.vocabulary.size, (2, length), generator=random)
        types_BS = torch.zeros(2, length, dtype=torch.int64)
        if model.token_types:
            types_BS = torch.randint(model.token_types, (2, length), generator=random)
        padding_mask_BS = torch.ones_like(tokens_BS)
        padding_mask_BS[1, length - length // 4 :] = 0
        positions_BS = torch.tensor([[0], [last - length]]) + torch.arange(length)
        batch = family_of(model.family).batch(
            tokens_BS,
            types_BS,
            labels_BS=tokens_BS,
            is_random_B=torch.zeros(2, dtype=torch.int64),
            loss_mask_BS=padding_mask_BS.float(),
            padding_mask_BS=padding_mask_BS,
            positions_BP=torch.arange(length).expand(2, -1),
            position_ids_BS=positions_BS,
        )
        begin = spec_of(model).begin(batch).changed(targets=None)
        theirs = {
            "input_ids": tokens_BS,
            "token_type_ids": types_BS,
            "attention_mask": padding_mask_BS,
            "position_ids": positions_BS + model.positions.position_embedding_offset,
        }
        return Inputs(begin, theirs, counted=padding_mask_BS.bool())

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        logits_BSV = state.hidden[..., : model.vocabulary.size]
        if not model.bert_binary_head:
            return {"logits": logits_BSV}
        assert state.pooled is not None
        return {"prediction_logits": logits_BSV, "seq_relationship_logits": state.pooled}

    def special_tokens(self, tokenizer: Any, source: Source) -> dict[str, Any]:
        return {"pad_token_id": tokenizer.pad_token_id}

    def end_only(self, source: Source) -> dict[str, Any]:
        return {"pad_token_id": None}


MASKED_LM = MaskedLM()
