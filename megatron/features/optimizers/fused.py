"""Parameters that are updated as matrices, and the matrices that are fused in them."""

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
"""Beginnings of the names of matrices that have a row for each token or position."""


def is_matrix(name: str, shard: Shard) -> bool:
    """True for a parameter that Muon updates: a matrix, or one for each expert, that is no table of
    tokens, positions or classes, no convolution of each channel by itself, and no pruning scores,
    of which only the order matters."""
    dimensions = 3 if ".experts." in name else 2
    fits = len(shard.full_shape) == dimensions and not name.endswith("_scores")
    return fits and ".conv." not in name and not name.startswith(_VOCABULARY)


def rows_in(context: RuleContext) -> Callable[[nn.Parameter], Sequence[Rows]]:
    """The function of a parameter to the rows of its matrices."""
    return lambda param: rows_of(context.names[param], shard_of(param), context.config)


def rows_of(name: str, shard: Shard, config: RunConfig) -> Sequence[Rows]:
    """Rows of each of the matrices that are fused in a parameter."""
    flags, model = config.section(OptimizersConfig), config.model
    rows = shard.full_shape[-2]
    parts = next((cut.parts for cut in shard.cuts if cut.parts), (rows,))
    if ".in_proj." in name:  # of a recurrent layer
        return in_order(parts)
    if ".qkv." in name:
        if flags.muon_split_qkv:
            gated = model.attention.attention_output_gate
            return (
                _queries_and_gates(parts, model.attention.kv_channels) if gated else in_order(parts)
            )
        if shard.part:
            raise ConfigError(
                "--muon-no-split-qkv needs a key and value head for each tensor-parallel rank; "
                "give fewer ranks (--tensor-model-parallel-size), or leave the flag out"
            )
    gated = model.mlp.gated and name.endswith((".up.weight",))
    return in_order((rows // 2, rows // 2) if gated and flags.muon_split_mlp else (rows,))


def _queries_and_gates(parts: Sequence[int], width: int) -> Sequence[Rows]:
    """Return the rows of queries, gates, keys and values, where each head's gate follows its
    queries."""
    heads = torch.arange(parts[0]).view(-1, 2, width)
    return heads[:, 0].flatten(), heads[:, 1].flatten(), *in_order(parts)[1:]
