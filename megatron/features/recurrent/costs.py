"""Weights, FLOPs and saved activations of recurrent layers, and of blocks with one sublayer."""

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
"""Number of products of each token with a state: one to write and one to read. The delta rule also
reads before it writes."""


@dataclass(frozen=True)
class MeanBlock:
    """Block of a model on a tensor-parallel rank, averaged over all blocks.

    Attributes:
        attention: fraction of the blocks with softmax attention.
        mlp: fraction of the blocks with an MLP or experts.
        sublayers: number of sublayers per block, two in a transformer.
        weights: elements of the matrices of recurrent layers.
        products: forward FLOPs per token in the states of recurrent layers.
        kept: elements per token that recurrent layers save for the backward pass: inputs and
            outputs of the convolution, the gate, and the outputs of states and norm.
        again: elements in ``kept`` that selective recomputation recomputes.
        wide: float32 elements per token that the delta rule saves without selective
            recomputation.
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
    """Return the mixers of all blocks. Multi-token prediction blocks have the last block's
    mixer."""
    mixers = model.part(PatternConfig).mixers
    return mixers + mixers[-1:] * model.blocks_ahead


@lru_cache(maxsize=256)
def mean_block(model: ModelConfig, tensor: int = 1) -> MeanBlock:
    """Return the average block of a whole model on one of ``tensor`` tensor-parallel ranks."""
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
    """Return the number of elements per token that the chunks of the delta rule save: matrices over
    a chunk's tokens, queries, keys, values and solutions, and a state for each chunk."""
    groups = heads * part.linear_num_key_heads / part.linear_num_value_heads
    of_values = 4 * CHUNK + 3 * (width + value_width) + width * value_width / CHUNK
    return heads * of_values + groups * (2 * CHUNK + 5 * width)


@lru_cache(maxsize=64)
def _weights(model: ModelConfig, mixer: str, tensor: int) -> int:
    """Return the number of weights of a layer on a rank: its matrices and convolution kernel."""
    layer = model.part(PatternConfig).mixers.index(mixer)
    tp = TensorParallel(Group(tuple(range(tensor))))
    with torch.device("meta"):
        module = features()["recurrent"].mixer(model, layer, tp, False)
    return sum(param.numel() for param in module.parameters() if param.dim() > 1)


def with_states(shape: TransformerShape, model: ModelConfig) -> TransformerShape:
    """Return the shape with the FLOPs of recurrent layers in the blocks that have them instead of
    attention."""
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
