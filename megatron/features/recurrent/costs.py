"""Weights, FLOPs and kept activations of layers with states, and of blocks of one sublayer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from megatron.config import ModelConfig
from megatron.config.features import features
from megatron.config.sections import States, memory_of
from megatron.features.recurrent.flags import CHUNK, DeltaConfig
from megatron.features.recurrent.pattern import ATTENTION, DELTA, MAMBA, NONE, PatternConfig
from megatron.model.flops import TransformerShape
from megatron.parallel.mesh import Group
from megatron.parallel.tensor_parallel import TensorParallel

_PASSES = {MAMBA: 2, DELTA: 3}
"""Products of a token with a state: written and read; the delta rule reads it once more before."""


@dataclass(frozen=True)
class MeanBlock:
    """A block of a model on a tensor-parallel rank, the mean over all blocks.

    Attributes:
        attention: share of the blocks that have softmax attention, ``mlp`` of those with an MLP or
            experts; ``sublayers`` of a block, two in a transformer.
        weights: matrices of layers with states.
        products: forward FLOPs of a token in their states.
        kept: numbers of a token that they keep for the backward pass: inputs and outputs of the
            convolution, the gate, and the outputs of states and norm; ``again``: those of them that
            selective recomputation computes again.
        wide: float32 numbers of a token that the delta rule keeps without that recomputation.
    """

    attention: float = 1.0
    mlp: float = 1.0
    sublayers: float = 2.0
    weights: float = 0.0
    products: float = 0.0
    kept: float = 0.0
    again: float = 0.0
    wide: float = 0.0


def _mixers(model: ModelConfig) -> tuple[str, ...]:
    """Mixers of all blocks, including the multi-token prediction blocks, which equal the last."""
    mixers = model.part(PatternConfig).mixers
    return mixers + mixers[-1:] * model.blocks_ahead


@lru_cache(maxsize=256)
def mean_block(model: ModelConfig, tensor: int = 1) -> MeanBlock:
    """Return the mean block of a complete model on one of ``tensor`` ranks."""
    mixers, last = _mixers(model), model.num_layers - 1
    if not mixers:
        return MeanBlock()
    weights = products = kept = again = wide = 0.0
    for layer, mixer in enumerate(mixers):
        if mixer in _PASSES:
            memory = memory_of(model, min(layer, last), tensor)
            assert isinstance(memory, States)
            (_, channels), state = memory.shapes
            weights += _weights(model, mixer, tensor)
            products += 2.0 * _PASSES[mixer] * math.prod(state)
            kept += 2 * channels + 3 * math.prod(state) / state[1]
            again += channels
            if mixer == DELTA:
                wide += _of_delta_rule(model.part(DeltaConfig), *state)
    count = len(mixers)
    mlps = sum(model.has("mlp", min(layer, last)) for layer in range(count))
    sums = mixers.count(ATTENTION), mlps, mlps + count - mixers.count(NONE)
    return MeanBlock(*(total / count for total in (*sums, weights, products, kept, again, wide)))


def _of_delta_rule(part: DeltaConfig, heads: int, width: int, value_width: int) -> float:
    """Numbers of a token that the chunks of the delta rule keep: matrices of a chunk's tokens,
    queries, keys, values and solutions, and a state for each chunk."""
    groups = heads * part.linear_num_key_heads / part.linear_num_value_heads
    of_values = 4 * CHUNK + 3 * (width + value_width) + width * value_width / CHUNK
    return heads * of_values + groups * (2 * CHUNK + 5 * width)


@lru_cache(maxsize=64)
def _weights(model: ModelConfig, mixer: str, tensor: int) -> int:
    """Matrices of a layer on a rank, with the taps of its convolution."""
    layer = model.part(PatternConfig).mixers.index(mixer)
    tp = TensorParallel(Group(tuple(range(tensor))))
    with torch.device("meta"):
        module = features()["recurrent"].mixer(model, layer, tp, False)
    return sum(param.numel() for param in module.parameters() if param.dim() > 1)


def with_states(shape: TransformerShape, model: ModelConfig) -> TransformerShape:
    """Return the shape with the products of layers with states instead of attention in their
    blocks."""
    mixers, mean = _mixers(model), mean_block(model)
    if not mixers:
        return shape
    windows = tuple(
        window if mixer == ATTENTION else 0
        for mixer, window in zip(mixers, shape.windows, strict=True)
    )
    replaced = sum(mixer in _PASSES for mixer in mixers) * shape.attention_flops
    matrices, scores = shape.within
    tokens, blocks = shape.seq_length, len(mixers)
    matrices += tokens * (2.0 * blocks * mean.weights - replaced)
    return replace(
        shape, windows=windows, within=(matrices, scores + tokens * blocks * mean.products)
    )
