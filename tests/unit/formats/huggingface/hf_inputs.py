"""The same micro batch for a model of ours and one of transformers, by family."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import ModelConfig
from megatron.data.kinds.masked_data.masked_batch import NO_LABEL, T5Batch
from megatron.families import spec_of
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.cross_entropy import Targets

VOCABULARY = 61
SAMPLES = 3


class Pair(NamedTuple):
    """A micro batch with targets; ``loss`` is that of the output of `transformers`."""

    ours: LayerState
    theirs: dict[str, Tensor]
    loss: Callable[[Any], Tensor]


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
    encoder_BE, decoder_BD = random_tokens(length), random_tokens(length * 2 // 3, 2)
    mask_BE, mask_BD = _padded(length, 3), _padded(decoder_BD.shape[1], 2)
    labels_BD = random_tokens(decoder_BD.shape[1], 3).where(mask_BD > 0, NO_LABEL)
    batch = T5Batch(encoder_BE, decoder_BD, labels_BD, mask_BD.float(), mask_BE, mask_BD)
    theirs = {
        "input_ids": encoder_BE, "attention_mask": mask_BE, "decoder_input_ids": decoder_BD,
        "decoder_attention_mask": mask_BD, "labels": labels_BD.where(mask_BD > 0, -100),
    }  # fmt: skip
    return Pair(spec_of(model).begin(batch), theirs, lambda output: output.loss)


_PAIRS = {"gpt": _gpt, "t5": _t5}
