"""What BERTs with heads for labelled text do in `transformers`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.data.labelled_text import LabelledBatch
from megatron.families import spec_of
from megatron.formats.huggingface.masked_lm import MaskedLM
from megatron.formats.huggingface.tasks import Inputs, compared_length
from megatron.model.layer_list import LayerState

_CHOICES = 3


class LabelledTextTask(MaskedLM):
    """An encoder that says which label a text has, which of several texts is the best, or where in
    a text a span is."""

    unit = "texts"

    def inputs(self, model: ModelConfig, seed: int) -> Inputs:
        """Two texts of two segments, the second padded; of questions two with as many choices."""
        choices = _CHOICES if model.head == "multiple_choice" else 1
        length, last = compared_length(model), model.positions.max_position_embeddings
        random = torch.Generator().manual_seed(seed)
        rows = 2 * choices
        tokens_BS = torch.randint(model.vocabulary.size, (rows, length), generator=random)
        types_BS = torch.zeros_like(tokens_BS)
        if model.token_types:
            types_BS = torch.randint(model.token_types, (rows, length), generator=random)
        padding_mask_BS = torch.ones_like(tokens_BS)
        padding_mask_BS[1::2, length - length // 4 :] = 0
        positions_BS = torch.arange(length).repeat(rows, 1)
        positions_BS[1::2] += last - length
        labels_B = torch.zeros(2, dtype=torch.int64)
        batch = LabelledBatch(tokens_BS, types_BS, padding_mask_BS, labels_B, choices)
        begin = spec_of(model).begin(batch)
        theirs = {
            "input_ids": tokens_BS,
            "token_type_ids": types_BS,
            "attention_mask": padding_mask_BS,
            "position_ids": positions_BS + model.positions.position_embedding_offset,
        }
        if choices > 1:
            theirs = {name: values.view(2, choices, -1) for name, values in theirs.items()}
        return Inputs(begin.changed(targets=None, position_ids=positions_BS), theirs)

    def outputs(self, state: LayerState, model: ModelConfig) -> dict[str, Tensor]:
        if model.head == "span":
            start_BS, end_BS = state.hidden.unbind(-1)
            return {"start_logits": start_BS, "end_logits": end_BS}
        assert state.pooled is not None
        return {"logits": state.pooled}

    def count(self, logits: Tensor) -> int:
        return len(logits)


LABELLED_TEXT = LabelledTextTask()
