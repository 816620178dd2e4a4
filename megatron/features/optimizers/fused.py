"""Parameters that are updated as matrices, and the rows of each matrix fused in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron.config import ConfigError, RunConfig
from megatron.features.optimizers.flags import OptimizersConfig
from megatron.features.optimizers.rules import RuleContext
from megatron.features.optimizers.whole import Rows, in_order
from megatron.parallel.shard import Shard, shard_of

_VOCABULARY = ("embedding.", "output_layer.", "encoder_embedding.", "decoder_embedding.")
"""Name prefixes of matrices with one row per token or position."""


def is_matrix(name: str, shard: Shard) -> bool:
    """Return whether a parameter is updated as a matrix: a matrix of a block, or a stack of one
    matrix per expert. Embeddings, output layers and depthwise convolutions are excluded. So are
    pruning scores, of which only the order matters."""
    dimensions = 3 if ".experts." in name else 2
    fits = len(shard.full_shape) == dimensions and not name.endswith("_scores")
    return fits and ".conv." not in name and not name.startswith(_VOCABULARY)


def rows_in(context: RuleContext) -> Callable[[nn.Parameter], Sequence[Rows]]:
    """Return a function that returns the rows of each matrix fused in a parameter."""
    return lambda param: rows_of(context.names[param], shard_of(param), context.config)


def rows_of(name: str, shard: Shard, config: RunConfig) -> Sequence[Rows]:
    """Return the rows of each matrix that is fused in a parameter. Raises ConfigError if ranks have
    only some matrices of a projection that should be updated as a whole."""
    flags, model = config.section(OptimizersConfig), config.model
    rows = shard.full_shape[-2]
    fused = parts_of(shard)
    parts = fused or (rows,)
    if ".in_proj." in name:  # a recurrent layer's input projection
        return in_order(parts)
    if ".qkv." in name:
        if flags.muon_split_qkv:
            if fused and model.attention.attention_output_gate:
                return _queries_and_gates(parts, model.attention.kv_channels)
            return in_order(parts)
        if shard.part:
            raise ConfigError(
                "--muon-no-split-qkv needs a key and value head for each tensor-parallel rank; "
                "give fewer ranks (--tensor-model-parallel-size), or leave the flag out"
            )
    gated = model.mlp.gated and name.endswith((".up.weight",))
    return in_order((rows // 2, rows // 2) if gated and flags.muon_split_mlp else (rows,))


def parts_of(shard: Shard) -> tuple[int, ...]:
    """Return the number of rows of each matrix that is fused in a parameter. Empty for a single
    matrix, such as the A factor of a low-rank adapter of a fused projection."""
    return next((cut.parts for cut in shard.cuts if cut.parts), ())


def _queries_and_gates(parts: Sequence[int], width: int) -> Sequence[Rows]:
    """Return the rows of queries, gates, keys and values. Each head's gate follows its queries."""
    heads = torch.arange(parts[0]).view(-1, 2, width)
    return heads[:, 0].flatten(), heads[:, 1].flatten(), *in_order(parts)[1:]
