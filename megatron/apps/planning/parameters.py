"""Parameters of each layer of a model, built on torch's meta device, and of each rank's share."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import torch

from megatron.config import ModelConfig, RunConfig
from megatron.config.layouts import Layout
from megatron.families import BlockLengths, build_model, family_of, spec_of, trained_spec
from megatron.features.adapters.flags import AdapterConfig
from megatron.parallel.mesh import Group
from megatron.parallel.partition import stage_bounds
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class LocalWidths:
    """Widths of one tensor-parallel rank's share of a block and of the token embedding, padding
    included; ``query`` and ``kv`` are all its heads together, keys and values each."""

    query: int
    kv: int
    ffn: int
    vocab: int


def local_widths(model: ModelConfig, tensor: int) -> LocalWidths:
    """The share of one of ``tensor`` ranks; the model is complete, with its vocabulary sizes."""
    return LocalWidths(
        query=model.attention.num_attention_heads // tensor * model.attention.kv_channels,
        kv=max(1, model.attention.num_query_groups // tensor) * model.attention.kv_channels,
        ffn=model.mlp.ffn_hidden_size // tensor,
        vocab=model.vocabulary.padded // tensor,
    )


@dataclass(frozen=True)
class LayerShare:
    """One tensor-parallel rank's share of a layer: its number of parameters, and what
    :class:`LayerSpec` says of it."""

    parameters: int
    block: bool
    tied_key: str | None
    cost: int
    with_next_block: bool


@lru_cache(maxsize=256)
def layer_shares(model: ModelConfig, tensor: int) -> tuple[LayerShare, ...]:
    """The layers of a complete model, as one of ``tensor`` ranks holds them; a tied layer counts
    whole at each of its places."""
    tp = TensorParallel(Group(tuple(range(tensor))))
    with torch.device("meta"):
        return tuple(
            LayerShare(
                sum(param.numel() for param in layer.build().parameters()),
                layer.block,
                layer.tied_key,
                layer.cost,
                layer.with_next_block,
            )
            for layer in spec_of(model).layers(tp)
        )


@lru_cache(maxsize=256)
def adapter_parameters(model: ModelConfig, adapters: AdapterConfig, tensor: int) -> float:
    """Parameters of the adapters of a block, the mean over all blocks, as one of ``tensor`` ranks
    holds them. Raises ConfigError if a target is unknown."""
    spec = trained_spec(RunConfig(model, sections=(adapters,)))
    tp = TensorParallel(Group(tuple(range(tensor))))
    blocks = [layer for layer in spec.layers(tp) if layer.block]
    with torch.device("meta"):
        params = [param for layer in blocks for param in layer.build().parameters()]
    return sum(param.numel() for param in params if param.requires_grad) / len(blocks)


def linear_parameters(model: ModelConfig, tensor: int, cross: bool = False) -> int:
    """Weights of the linear layers of a block, with or without cross-attention, as one of
    ``tensor`` ranks holds them."""
    share, gates = local_widths(model, tensor), 1 + model.mlp.gated
    attention = (1 + cross) * (2 * share.query + 2 * share.kv)
    return model.hidden_size * (attention + (gates + 1) * share.ffn)


def norms_of_block(model: ModelConfig, cross: bool = False) -> int:
    """Number of norms of hidden states in a block, without those of heads."""
    return 2 - model.shared_parallel_norm + cross + (2 + cross) * model.norm.post_norm


@dataclass(frozen=True)
class RankShare:
    """One pipeline rank's share of a model.

    Attributes:
        parameters: of one tensor-parallel rank; a tied layer counts once.
        stages: the blocks of each stage, by their sequences.
        first, last: whether it has the first token embedding, and the head.
        float8: how many blocks of each stage compute in 8 bits.
        tied: copies on different ranks, and parameters, of each tied layer that has several.
    """

    rank: int
    parameters: int
    stages: tuple[tuple[BlockLengths, ...], ...]
    first: bool
    last: bool
    float8: tuple[int, ...]
    tied: tuple[tuple[int, int], ...] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks of each stage."""
        return tuple(map(len, self.stages))


def rank_shares(
    model: ModelConfig,
    layout: Layout,
    partition: str = "blocks",
    float8: range | None = None,
) -> list[RankShare]:
    """The share of each rank of the pipeline; ``partition`` is ``--pipeline-partition``, ``float8``
    the blocks that compute in 8 bits (None: all if the layout does). Raises ValueError if there are
    more stages than blocks."""
    layers = layer_shares(model, layout.tensor)
    is_block = [layer.block for layer in layers]
    if float8 is None:
        float8 = range(sum(is_block) if layout.float8 else 0)
    lengths = family_of(model.family).block_lengths(model)
    assert len(lengths) == sum(is_block)
    # Blocks before each layer.
    before = [0, *accumulate(is_block)]
    stages = layout.pipeline * layout.chunks
    bounds = stage_bounds(
        is_block,
        [layer.parameters for layer in layers],
        stages,
        partition,
        [layer.cost for layer in layers],
        [layer.with_next_block for layer in layers],
    )
    held = [stages_of(layout, rank) for rank in range(layout.pipeline)]
    own = [
        [layer for s in held_here for layer in layers[bounds[s] : bounds[s + 1]]]
        for held_here in held
    ]
    tied = [{x.tied_key: x.parameters for x in here if x.tied_key is not None} for here in own]
    copies = Counter(chain(*tied))
    return [
        RankShare(
            rank,
            sum(tied[rank].values()) + sum(x.parameters for x in own[rank] if x.tied_key is None),
            tuple(lengths[before[bounds[s]] : before[bounds[s + 1]]] for s in held[rank]),
            0 in held[rank],
            stages - 1 in held[rank],
            tuple(
                len([n for n in range(before[bounds[s]], before[bounds[s + 1]]) if n in float8])
                for s in held[rank]
            ),
            tuple((copies[key], size) for key, size in tied[rank].items() if copies[key] > 1),
        )
        for rank in range(layout.pipeline)
    ]


def head_shape(model: ModelConfig) -> tuple[int, float]:
    """Tokens of a sample whose logits are computed, and forward FLOPs of a sample in what is
    neither a block nor the vocabulary's matrix, which tensor-parallel ranks do not share."""
    shape = family_of(model.family).shape(model)
    shape = shape.decoder or shape
    return shape.predictions or shape.seq_length, shape.other


def stages_of(layout: Layout, rank: int) -> list[int]:
    """The stages of a pipeline rank, in layer order."""
    if layout.schedule == "dualpipev":
        return [rank, 2 * layout.pipeline - 1 - rank]
    return [rank + chunk * layout.pipeline for chunk in range(layout.chunks)]


@lru_cache(maxsize=256)
def model_parameters(model: ModelConfig, padded: bool = False) -> int:
    """Parameters of the whole model; by default without the padding of the vocabulary."""
    with torch.device("meta"):
        params = build_model(model).parameters()
    shards = map(shard_of, params)
    return sum(math.prod(s.full_shape if padded else s.canonical_shape) for s in shards)
