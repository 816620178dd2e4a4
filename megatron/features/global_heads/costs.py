"""Weights, FLOPs and widths of blocks with different heads, for plans and log lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.config import ModelConfig
from megatron.features.global_heads.flags import GlobalHeadsConfig, keys_are_values, of_block
from megatron.model.flops import TransformerShape


@dataclass(frozen=True)
class BlockKind:
    """Blocks of a model that have the same heads.

    Attributes:
        share: of all blocks.
        model: the model as if all blocks had their heads.
        keys_are_values: True if they project no values.
    """

    share: float
    model: ModelConfig
    keys_are_values: bool


@lru_cache(maxsize=256)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """Return the kinds of blocks by their heads; one where all blocks have the same. Blocks that
    predict further tokens have the heads of the last one."""
    if not model.part(GlobalHeadsConfig).replaces_attention:
        return (BlockKind(1.0, model, False),)
    last = model.num_layers - 1
    layers = [*range(model.num_layers), *[last] * model.blocks_ahead]
    kinds = Counter((of_block(model, layer), keys_are_values(model, layer)) for layer in layers)
    return tuple(BlockKind(count / len(layers), *kind) for kind, count in kinds.items())


def with_global_heads(shape: TransformerShape, model: ModelConfig) -> TransformerShape:
    """Return the shape with the products of the heads in blocks without a window, instead of the
    products of the other blocks' heads."""
    part = model.part(GlobalHeadsConfig)
    if not part.replaces_attention:
        return shape
    whole = next((n for n in range(model.num_layers) if model.attention.window(n) is None), None)
    if whole is None:
        return shape
    attention = of_block(model, whole).attention
    heads = {"kv_channels": attention.kv_channels, "num_query_groups": attention.num_query_groups}
    there = replace(shape, **heads)  # type: ignore[arg-type]
    each = there.attention_flops - shape.attention_flops
    if part.global_keys_as_values:
        each -= 2 * model.hidden_size * attention.num_query_groups * attention.kv_channels
    blocks = shape.windows.count(None) if shape.windows else shape.num_layers
    matrices, scores = shape.within
    return replace(
        shape,
        full_channels=2 * attention.kv_channels,
        within=(matrices + shape.seq_length * blocks * each, scores),
    )
