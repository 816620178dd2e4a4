"""The same micro batch for a model of ours and one of transformers, by family."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import ModelConfig
from megatron.families import spec_of
from megatron.features.masked.batch import NO_LABEL, BertSample, T5Batch, collate_bert
from megatron.features.masked.heads import LabelledBatch
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.loss_head import Targets

VOCABULARY = 61
SAMPLES = 3


class Pair(NamedTuple):
    """A micro batch with targets; ``loss`` is that of the output of `transformers`. ``counted``
    [B, S] says which positions of the logits are not padding; None for all."""

    ours: LayerState
    theirs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]
    counted: Tensor | None = None


def pair(model: ModelConfig, length: int) -> Pair:
    """Random tokens; where the family knows padding, samples have some of it at their end."""
    return _PAIRS[model.family](model, length)


def random_tokens(length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (SAMPLES, 40), generator=generator)[:, :length]


def _gpt(model: ModelConfig, length: int) -> Pair:
    tokens, labels = random_tokens(length), random_tokens(length, 2)
    state = LayerState(
        tokens, masks=AttentionMasks(), targets=Targets(labels, torch.ones(labels.shape))
    )
    return Pair(
        state,
        {"input_ids": tokens},
        lambda output: F.cross_entropy(output.logits.flatten(0, 1), labels.flatten()),
    )


def _padded(length: int, short: int) -> Tensor:
    """The padding mask of samples of which one is full."""
    lengths = torch.tensor([length, length - short, length - 2 * short])
    return (torch.arange(length) < lengths[:, None]).long()


def _t5(model: ModelConfig, length: int) -> Pair:
    encoder_BE, decoder_BD = (
        _without_padding(tokens_BS, model)
        for tokens_BS in (random_tokens(length), random_tokens(length * 2 // 3, 2))
    )
    mask_BE, mask_BD = _padded(length, 3), _padded(decoder_BD.shape[1], 2)
    labels_BD = random_tokens(decoder_BD.shape[1], 3).where(mask_BD > 0, NO_LABEL)
    batch = T5Batch(encoder_BE, decoder_BD, labels_BD, mask_BD.float(), mask_BE, mask_BD)
    theirs = {
        "input_ids": encoder_BE, "attention_mask": mask_BE, "decoder_input_ids": decoder_BD,
        "decoder_attention_mask": mask_BD, "labels": labels_BD.where(mask_BD > 0, -100),
    }  # fmt: skip
    return Pair(spec_of(model).begin(batch), theirs, lambda output: output.loss, mask_BD > 0)


_CHOICES = 2


def _without_padding(tokens_BS: Tensor, model: ModelConfig) -> Tensor:
    """Tokens of which none is that of padding, whose row of the embeddings has no gradient in
    `transformers`, and at which it counts no position."""
    padding = model.positions.position_embedding_offset - 1
    return tokens_BS.masked_fill(tokens_BS == padding, VOCABULARY - 1)


def _labelled(model: ModelConfig, length: int) -> Pair:
    """Three texts, or as many questions with two choices."""
    rows = _CHOICES if model.head == "multiple_choice" else 1
    tokens_BS = torch.cat([random_tokens(length, 5 + n) for n in range(rows)])
    tokens_BS = _without_padding(tokens_BS, model)
    mask_BS = _padded(length, 3).repeat(rows, 1)
    types_BS = tokens_BS % max(model.token_types, 1)
    labels_B = torch.arange(SAMPLES) % (model.num_labels or _CHOICES)
    theirs = {"input_ids": tokens_BS, "token_type_ids": types_BS, "attention_mask": mask_BS}
    if model.head == "span":
        labels_B = torch.tensor([[0, 3], [2, length + 1], [5, 7]])
        theirs |= {"start_positions": labels_B[:, 0], "end_positions": labels_B[:, 1]}
    else:
        labels_B = labels_B.float() if model.num_labels == 1 else labels_B
        if rows > 1:
            theirs = {name: each.view(SAMPLES, rows, -1) for name, each in theirs.items()}
        theirs["labels"] = labels_B
    batch = LabelledBatch(tokens_BS, types_BS, mask_BS, labels_B, rows)
    return Pair(spec_of(model).begin(batch), theirs, lambda output: output.loss)


def _bert(model: ModelConfig, length: int) -> Pair:
    if model.head != "lm":
        return _labelled(model, length)
    tokens_BS, mask_BS = _without_padding(random_tokens(length), model), _padded(length, 3)
    types_BS = random_tokens(length, 2) % max(model.token_types, 1)
    predicted_BS = (random_tokens(length, 3) % 4 == 0) & (mask_BS > 0)
    labels_BS = random_tokens(length, 4).where(predicted_BS, NO_LABEL)
    order_B = torch.tensor([1, 0, 1])
    rows = (tokens_BS, types_BS, labels_BS, order_B, predicted_BS.float(), mask_BS)
    batch = collate_bert([BertSample(*map(Tensor.numpy, row)) for row in zip(*rows, strict=True)])
    theirs = {
        "input_ids": tokens_BS, "token_type_ids": types_BS, "attention_mask": mask_BS,
        "labels": labels_BS.where(predicted_BS, -100),
    }  # fmt: skip
    if model.bert_binary_head:
        theirs["next_sentence_label"] = order_B
    return Pair(spec_of(model).begin(batch), theirs, lambda output: output.loss, mask_BS > 0)


_PAIRS = {"gpt": _gpt, "bert": _bert, "t5": _t5}
