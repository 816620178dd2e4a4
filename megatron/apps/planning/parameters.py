"""Parameter counts of a model's layers, built on torch's meta device, and of each rank's share."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

import torch

from megatron.config import ModelConfig, RunConfig
from megatron.config.layouts import BOTH_WAYS, Layout
from megatron.config.sections import States, memory_of
from megatron.families import BlockLengths, build_model, family_of, spec_of, trained_spec
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.context.costs import heads_of, lengths_of_rank
from megatron.features.global_heads.costs import block_kinds
from megatron.features.latent.costs import layer_weights
from megatron.features.latent.flags import LatentConfig
from megatron.features.recurrent.costs import mean_block
from megatron.parallel.mesh import Group
from megatron.parallel.pipeline_schedules import stage_bounds
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class LocalWidths:
    """Widths of a tensor-parallel rank's layers, including padding, averaged over blocks.

    Attributes:
        query, kv: total width of the rank's query heads, and of its key (or value) heads.
        values: width of the value projection. 0 if keys are also used as values.
        heads: number of query and key heads.
        alone: width of queries with a separate projection, which is used if there are fewer key
          heads than ranks.
        gate, ffn, vocab: widths of attention's output gate, the MLP and the token embedding.
    """

    query: float
    kv: float
    values: float
    heads: float
    alone: float
    gate: float
    ffn: int
    vocab: int


def local_widths(model: ModelConfig, tensor: int) -> LocalWidths:
    """Return the widths on one of ``tensor`` ranks. The model must have its vocabulary sizes."""
    query = kv = values = heads = alone = 0.0
    for kind in block_kinds(model):
        queries, keys, width, apart = heads_of(kind.model, tensor)
        query += kind.share * queries * width
        kv += kind.share * keys * width
        values += kind.share * keys * width * (not kind.keys_are_values)
        heads += kind.share * (queries + keys)
        alone += kind.share * queries * width * apart
    return LocalWidths(
        query=query,
        kv=kv,
        values=values,
        heads=heads,
        alone=alone,
        gate=query * model.attention.attention_output_gate,
        ffn=model.mlp.ffn_hidden_size // tensor,
        vocab=model.vocabulary.padded // tensor,
    )


@dataclass(frozen=True)
class LayerShare:
    """A tensor-parallel rank's share of a layer. ``experts`` is the number of its experts'
    parameters before expert-parallel ranks divide them. For other fields see `LayerSpec`."""

    parameters: int
    experts: int
    block: bool
    tied_key: str | None
    cost: int
    with_next_block: bool


@lru_cache(maxsize=256)
def layer_shares(
    model: ModelConfig, tensor: int, whole_experts: bool = False
) -> tuple[LayerShare, ...]:
    """Return the layers of a complete model on one of ``tensor`` ranks. A tied layer is counted in
    full wherever it occurs."""
    how = "whole" if whole_experts else "cut"
    tp, shares = TensorParallel(Group(tuple(range(tensor))), experts=how), []
    with torch.device("meta"):
        for layer in spec_of(model).layers(tp):
            sizes = Counter[bool]()
            for param in layer.build().parameters():
                sizes[shard_of(param).over("expert") is not None] += param.numel()
            traits = layer.block, layer.tied_key, layer.cost, layer.with_next_block
            shares.append(LayerShare(sizes.total(), sizes[True], *traits))
    return tuple(shares)


@lru_cache(maxsize=256)
def adapter_parameters(model: ModelConfig, adapters: AdapterConfig, tensor: int) -> float:
    """Return the average number of adapter parameters per block on one of ``tensor`` ranks. Raises
    ConfigError if a target of the adapters is unknown."""
    spec = trained_spec(RunConfig(model, sections=(adapters,)))
    tp = TensorParallel(Group(tuple(range(tensor))))
    blocks = [layer for layer in spec.layers(tp) if layer.block]
    with torch.device("meta"):
        params = [param for layer in blocks for param in layer.build().parameters()]
    return sum(param.numel() for param in params if param.requires_grad) / len(blocks)


def linear_parameters(model: ModelConfig, tensor: int, cross: bool = False) -> int:
    """Return the number of weights in a block's linear layers on one of ``tensor`` ranks, averaged
    over blocks. With ``cross``, include cross-attention."""
    share, gates = local_widths(model, tensor), 1 + model.mlp.gated
    mean = mean_block(model, tensor)
    mlp = mean.mlp * model.hidden_size * (gates + 1) * share.ffn
    attention = mean.attention * attention_weights(model, tensor, cross)
    return round(attention + mlp + mean.weights)


def attention_weights(model: ModelConfig, tensor: int, cross: bool = False) -> float:
    """Return the number of attention weights per block on one of ``tensor`` ranks, averaged over
    the blocks that have attention."""
    if not model.part(LatentConfig).idle:
        return layer_weights(model, tensor)
    share = local_widths(model, tensor)
    own = 2 * share.query + share.kv + share.values + share.gate
    return model.hidden_size * (own + cross * 2 * (share.query + share.kv))


def norms_of_block(model: ModelConfig, cross: bool = False) -> int:
    """Return the number of norms of hidden states in a block, without QK norms."""
    pre = (2 - model.shared_parallel_norm + cross) * model.norm.pre_norm
    return pre + (2 + cross) * model.norm.post_norm


@dataclass(frozen=True)
class RankShare:
    """A pipeline rank's share of a model.

    Attributes:
        parameters: number of parameters on one tensor-parallel rank. A tied layer counts once.
        experts: how many of ``parameters`` are replicated only on ranks with the same experts.
        routed: number of blocks with experts in each stage.
        stages: sequence lengths of the blocks in each stage.
        first, last: whether the rank has the first token embedding, and the output head.
        float8: number of blocks in each stage that compute in FP8.
        tied: (copies on different ranks, parameters) of each tied layer with several copies.
    """

    rank: int
    parameters: int
    stages: tuple[tuple[BlockLengths, ...], ...]
    first: bool
    last: bool
    float8: tuple[int, ...]
    tied: tuple[tuple[int, int], ...] = ()
    experts: int = 0
    routed: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks in each stage."""
        return tuple(map(len, self.stages))


def rank_shares(
    model: ModelConfig,
    layout: Layout,
    partition: str = "blocks",
    float8: range | None = None,
) -> list[RankShare]:
    """Return each pipeline rank's share. ``partition`` is the value of ``--pipeline-partition``.
    ``float8`` is the range of blocks that compute in FP8. None means all if the layout uses FP8.
    Raises ValueError if there are more stages than blocks."""
    layers = layer_shares(model, layout.tensor, layout.expert_tensor is not None)
    is_block = [layer.block for layer in layers]
    if float8 is None:
        float8 = range(sum(is_block) if layout.float8 else 0)
    lengths = block_lengths(model, layout)
    assert len(lengths) == sum(is_block)
    stages = layout.pipeline * layout.chunks
    bounds = stage_bounds(
        is_block,
        [layer.parameters for layer in layers],
        stages,
        partition,
        [layer.cost for layer in layers],
        [layer.with_next_block for layer in layers],
    )
    blocks_before = [0, *accumulate(is_block)]
    ends = [blocks_before[bound] for bound in bounds]  # number of blocks before each stage
    stages_by_rank = [stages_of(layout, rank) for rank in range(layout.pipeline)]
    layers_by_rank = [
        [layer for s in stages_here for layer in layers[bounds[s] : bounds[s + 1]]]
        for stages_here in stages_by_rank
    ]
    tied_by_rank = [
        {layer.tied_key: layer.parameters for layer in layers_here if layer.tied_key is not None}
        for layers_here in layers_by_rank
    ]
    copies = Counter(chain(*tied_by_rank))
    shares = []
    for rank, stages_here in enumerate(stages_by_rank):
        tied = tied_by_rank[rank]
        untied = sum(x.parameters for x in layers_by_rank[rank] if x.tied_key is None)
        experts = sum(layer.experts for layer in layers_by_rank[rank])
        shares.append(
            RankShare(
                rank,
                sum(tied.values()) + untied - experts + experts // layout.expert,
                tuple(lengths[ends[s] : ends[s + 1]] for s in stages_here),
                0 in stages_here,
                stages - 1 in stages_here,
                tuple(sum(n in float8 for n in range(ends[s], ends[s + 1])) for s in stages_here),
                tuple((copies[key], size) for key, size in tied.items() if copies[key] > 1),
                experts // layout.expert,
                tuple(
                    sum(layer.experts > 0 for layer in layers[bounds[s] : bounds[s + 1]])
                    for s in stages_here
                ),
            )
        )
    return shares


def block_lengths(model: ModelConfig, layout: Layout) -> tuple[BlockLengths, ...]:
    """Return the sequence lengths of each block on one context-parallel rank."""
    whole = family_of(model.family).block_lengths(model)
    return tuple(lengths_of_rank(lengths, layout.context) for lengths in whole)


@lru_cache(maxsize=256)
def head_shape(model: ModelConfig) -> tuple[int, float]:
    """Return the number of tokens per sample that have logits, and the forward FLOPs per sample
    that every tensor-parallel rank computes outside blocks and the vocabulary GEMM."""
    shape = family_of(model.family).shape(model)
    shape = shape.last
    return shape.predictions or shape.seq_length, shape.other


def stages_of(layout: Layout, rank: int) -> list[int]:
    """Return the stages of a pipeline rank, in layer order."""
    if layout.schedule in BOTH_WAYS:
        return [rank, 2 * layout.pipeline - 1 - rank]
    return [rank + chunk * layout.pipeline for chunk in range(layout.chunks)]


@lru_cache(maxsize=256)
def model_parameters(model: ModelConfig, padded: bool = False) -> int:
    """Return the number of parameters of the whole model, by default without padding."""
    with torch.device("meta"):
        params = build_model(model).parameters()
    shards = map(shard_of, params)
    return sum(math.prod(s.full_shape if padded else s.canonical_shape) for s in shards)


def kept_bytes(model: ModelConfig, itemsize: int, tensor_size: int = 1) -> tuple[int, int]:
    """Return the bytes that generation stores per token, and the bytes per text regardless of its
    length, on one of ``tensor_size`` ranks. ``itemsize`` is the number of bytes per weight."""
    of_token, of_text = 0, 0
    for layer in range(model.num_layers):
        memory = memory_of(model, layer, tensor_size)
        if isinstance(memory, States):
            of_text += memory.numbers * max(itemsize, 4)
        elif memory is not None:
            of_token += memory.tensors * memory.heads * memory.width * itemsize
    return of_token, of_text
