"""Tokens, positions and targets of multi-token prediction, shifted within whole sequences.

Every rank shifts whole sequences before its part of a divided sequence is taken, so that nothing
has to travel between the ranks of the context axis.

Shapes: B micro batch, S sequence, P predicted positions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.data.gpt_batch import GPTBatch
from megatron.features.multi_token.flags import MultiTokenConfig
from megatron.model.layer_list import LayerState
from megatron.model.spec import ModelSpec
from megatron.parallel.loss_head import Targets


def with_losses_ahead(spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """The model of a run that is trained by the losses of its further tokens, too. They have no
    perplexity of their own, and are no part of ``lm loss``."""
    weights = model.part(MultiTokenConfig).loss_weights

    def begin(batch: GPTBatch) -> LayerState:
        depths = map(partial(state_ahead, batch), range(1, len(weights) + 1))
        return spec.begin(batch).changed(batch=batch, ahead=tuple(depths))

    return replace(
        spec,
        begin=begin,
        losses={**spec.losses, **weights},
        no_perplexity=spec.no_perplexity | weights.keys(),
        training_only=spec.training_only | weights.keys(),
    )


def state_ahead(batch: GPTBatch, shift: int) -> LayerState:
    """The initial state of a micro batch ``shift`` tokens ahead: at each place the token so much
    later, its position, and the target of that token; 0, which is not counted, where the sequence
    has no such token.

    Where attention is kept within documents, a place counts only if all that it reads and its
    target are in its document, as in Megatron-LM's packed sequences: the model's own hidden state
    there knows nothing of the next document. The label of the last token of a sample has that
    token's document. Megatron-LM shifts samples cut from a stream across documents.
    """
    tokens_BS, documents_BS = batch.tokens_BS, batch.document_ids_BS
    positions_BS = batch.position_ids_BS
    if positions_BS is None:
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
    labels_BS, mask_BS = (shifted(x, shift) for x in (batch.labels_BS, batch.loss_mask_BS))
    tokens_BS = shifted(tokens_BS, shift)
    if documents_BS is not None:
        last_B1 = documents_BS[:, -1:]
        of_labels_BS = torch.cat((documents_BS[:, 1:], last_B1), dim=1)
        read_BS = shifted(documents_BS, shift, -1) == documents_BS
        tokens_BS = tokens_BS.masked_fill(~read_BS, 0)
        same_BS = read_BS & (shifted(of_labels_BS, shift, -1) == documents_BS)
        mask_BS = mask_BS * same_BS
    targets = Targets(labels_BS, mask_BS)
    if batch.positions_BP is not None:
        targets = _at_positions(targets, batch.positions_BP, shift)
    return LayerState(tokens_BS, position_ids=shifted(positions_BS, shift), targets=targets)


def shifted(x_BS: Tensor, shift: int, fill: int = 0) -> Tensor:
    """[B, S] with the values ``shift`` places later, and ``fill`` at the end."""
    end_BS = x_BS.new_full((len(x_BS), shift), fill)
    return torch.cat((x_BS[:, shift:], end_BS), dim=1)


def _at_positions(targets: Targets, positions_BP: Tensor, shift: int) -> Targets:
    """The shifted targets at the places from which the targets at these positions are so far ahead;
    those at the beginning of a row, which no place is before, stay there and do not count."""
    length = targets.labels_BS.shape[1]
    before_BP = positions_BP % length >= shift
    places_BP = positions_BP - shift * before_BP
    labels_BP, mask_BP = targets.at(places_BP)[:2]
    return Targets(labels_BP, mask_BP * before_BP, places_BP)
