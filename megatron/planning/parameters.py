"""Parameters of a GPT: how many each layer has, and how many each rank of a layout holds.

The layer list is that of ``megatron.model.gpt``: token table, positions, blocks, final norm, head.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import ModelConfig
from megatron.config.layouts import Layout
from megatron.parallel.partition import stage_bounds


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
    assert model.num_attention_heads and model.num_query_groups and model.kv_channels
    assert model.ffn_hidden_size and model.padded_vocab_size
    return LocalWidths(
        query=model.num_attention_heads // tensor * model.kv_channels,
        kv=max(1, model.num_query_groups // tensor) * model.kv_channels,
        ffn=model.ffn_hidden_size // tensor,
        vocab=model.padded_vocab_size // tensor,
    )


def layer_parameters(model: ModelConfig, tensor: int) -> list[int]:
    """Parameters of each layer of the list on one tensor-parallel rank.

    The head counts whole, also where it is the token table once more.
    """
    assert model.num_layers and model.hidden_size and model.max_position_embeddings
    hidden, share = model.hidden_size, local_widths(model, tensor)
    vectors = 2 if model.normalization == "LayerNorm" else 1
    norm = hidden * vectors
    learned = model.position_embedding_type == "learned_absolute"
    table = share.vocab * hidden
    rows = model.max_position_embeddings + model.position_embedding_offset if learned else 0
    embedding = rows * hidden + norm * model.embed_layernorm
    block = _block(model, share) + norms_of_block(model) * norm
    if model.qk_layernorm:
        assert model.kv_channels
        block += 2 * model.kv_channels * vectors
    return [table, embedding, *[block] * model.num_layers, norm, table]


def norms_of_block(model: ModelConfig) -> int:
    """Norms of hidden states in a block; those of heads are not among them."""
    return 2 - model.shared_parallel_norm + 2 * model.post_norm


def _block(model: ModelConfig, share: LocalWidths) -> int:
    """Matrices and biases of a block. Biases behind a sum over ranks are whole on each of them."""
    assert model.hidden_size
    hidden, bias = model.hidden_size, model.add_bias_linear
    qkv = share.query + 2 * share.kv
    up = share.ffn * (2 if model.gated else 1)
    return (
        qkv * (hidden + model.qkv_bias)
        + share.query * hidden
        + up * (hidden + bias)
        + share.ffn * hidden
        + hidden * (model.attention_bias + bias)
    )


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
    weights = layer_parameters(model, layout.tensor)
    is_block = [2 <= place < len(weights) - 2 for place in range(len(weights))]
    stages = layout.pipeline * layout.chunks
    bounds = stage_bounds(is_block, weights, stages, partition)
    shares = []
    for rank in range(layout.pipeline):
        held = stages_of(layout, rank)
        places = [place for stage in held for place in range(bounds[stage], bounds[stage + 1])]
        first, last = 0 in held, stages - 1 in held
        twice = weights[-1] if model.tied and first and last else 0
        shares.append(
            RankShare(
                rank,
                sum(weights[place] for place in places) - twice,
                tuple(sum(is_block[bounds[s] : bounds[s + 1]]) for s in held),
                first,
                last,
            )
        )
    return shares


def stages_of(layout: Layout, rank: int) -> list[int]:
    """The stages that a rank of the pipeline holds, in layer order."""
    if layout.schedule == "dualpipev":
        return [rank, 2 * layout.pipeline - 1 - rank]
    return [rank + chunk * layout.pipeline for chunk in range(layout.chunks)]


def model_parameters(model: ModelConfig, padded: bool = False) -> int:
    """Parameters of the whole model; by default without the padding of the vocabulary."""
    assert model.hidden_size and model.padded_vocab_size and model.unpadded_vocab_size
    weights = layer_parameters(model, 1)
    tables = 1 if model.tied else 2
    rows = model.padded_vocab_size if padded else model.unpadded_vocab_size
    return sum(weights[1:-1]) + tables * rows * model.hidden_size
