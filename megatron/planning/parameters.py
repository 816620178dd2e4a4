"""How many parameters each layer of a model has, and how many each rank of a layout holds.

The layers are those of the model's family, built on torch's meta device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.families import build_model, spec_of
from megatron.parallel.mesh import Group
from megatron.parallel.partition import stage_bounds
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class LocalWidths:
    """Widths of one tensor-parallel rank's share of a block and of the token table.

    Attributes:
        query: all its query heads together.
        kv: all its key heads together, and as much again for values. Where there are fewer heads
            than ranks, several ranks hold the same one.
        ffn: its share of the MLP's inner width.
        vocab: its rows of the token table, padding included.
    """

    query: int
    kv: int
    ffn: int
    vocab: int


def local_widths(model: ModelConfig, tensor: int) -> LocalWidths:
    """One rank's share of ``tensor``; the model is complete, its vocabulary sizes filled in."""
    return LocalWidths(
        query=model.attention.num_attention_heads // tensor * model.attention.kv_channels,
        kv=max(1, model.attention.num_query_groups // tensor) * model.attention.kv_channels,
        ffn=model.mlp.ffn_hidden_size // tensor,
        vocab=model.vocabulary.padded // tensor,
    )


@dataclass(frozen=True)
class LayerShare:
    """One tensor-parallel rank's share of a layer.

    Attributes:
        parameters: how many it has.
        block: whether it is one of the repeated blocks.
        tied_key: layers with the same key are one; None for a layer of its own.
    """

    parameters: int
    block: bool
    tied_key: str | None


@lru_cache(maxsize=256)
def layer_shares(model: ModelConfig, tensor: int) -> tuple[LayerShare, ...]:
    """The layers of a model whose vocabulary sizes are filled in, as one of ``tensor`` ranks holds
    them; a tied layer counts whole at each of its places."""
    tp = TensorParallel(Group(tuple(range(tensor))))
    with torch.device("meta"):
        return tuple(
            LayerShare(
                sum(param.numel() for param in layer.build().parameters()),
                layer.block,
                layer.tied_key,
            )
            for layer in spec_of(model).layers(tp)
        )


def norms_of_block(model: ModelConfig) -> int:
    """Norms of hidden states in a block; those of heads are not among them."""
    return 2 - model.shared_parallel_norm + 2 * model.norm.post_norm


@dataclass(frozen=True)
class RankShare:
    """What one rank of a pipeline holds.

    Attributes:
        rank: its number in the pipeline.
        parameters: how many, on one tensor-parallel rank; a tied table counts once.
        blocks: number of blocks of each of its stages.
        first: whether the token table's lookup is here.
        last: whether the output head is here.
    """

    rank: int
    parameters: int
    blocks: tuple[int, ...]
    first: bool
    last: bool


def rank_shares(model: ModelConfig, layout: Layout, partition: str = "blocks") -> list[RankShare]:
    """What each rank of the pipeline holds.

    Args:
        model: the complete model, its vocabulary padded for the layout.
        layout: the layout.
        partition: how the layer list is cut, ``--pipeline-partition``.

    Raises:
        ValueError: there are more stages than blocks.
    """
    layers = layer_shares(model, layout.tensor)
    is_block = [layer.block for layer in layers]
    stages = layout.pipeline * layout.chunks
    bounds = stage_bounds(is_block, [layer.parameters for layer in layers], stages, partition)
    shares = []
    for rank in range(layout.pipeline):
        held = stages_of(layout, rank)
        places = [place for stage in held for place in range(bounds[stage], bounds[stage + 1])]
        shares.append(
            RankShare(
                rank,
                _counted_once([layers[place] for place in places]),
                tuple(sum(is_block[bounds[s] : bounds[s + 1]]) for s in held),
                0 in held,
                stages - 1 in held,
            )
        )
    return shares


def _counted_once(layers: Sequence[LayerShare]) -> int:
    """Parameters of layers, of tied ones once."""
    tied = {layer.tied_key: layer.parameters for layer in layers if layer.tied_key is not None}
    return sum(tied.values()) + sum(x.parameters for x in layers if x.tied_key is None)


def stages_of(layout: Layout, rank: int) -> list[int]:
    """The stages that a rank of the pipeline holds, in layer order."""
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
