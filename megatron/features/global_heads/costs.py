"""Numbers of weights, FLOPs and widths of models whose blocks have different heads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.config import ModelConfig
from megatron.features.global_heads.flags import GlobalHeadsConfig, keys_are_values, of_block
from megatron.model.flops import TransformerShape


@dataclass(frozen=True)
class BlockKind:
    """Group of blocks with the same heads.

    Attributes:
        share: fraction of the model's blocks.
        model: configuration of the model as if all blocks had these heads.
        keys_are_values: whether these blocks have no value projection.
    """

    share: float
    model: ModelConfig
    keys_are_values: bool


@lru_cache(maxsize=256)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """Group the blocks by their heads. Return a single kind if all blocks are the same. MTP blocks
    have the heads of the last block."""
    if not model.part(GlobalHeadsConfig).replaces_attention:
        return (BlockKind(1.0, model, False),)
    last = model.num_layers - 1
    layers = [*range(model.num_layers), *[last] * model.blocks_ahead]
    kinds = Counter((of_block(model, layer), keys_are_values(model, layer)) for layer in layers)
    return tuple(BlockKind(count / len(layers), *kind) for kind, count in kinds.items())


def with_global_heads(shape: TransformerShape, model: ModelConfig) -> TransformerShape:
    """Return the shape with the FLOPs of blocks without a window computed from their own heads."""
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
