"""Flags for the heads in blocks without a sliding window, and for other properties of Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.config.features import ModelPart
from megatron.config.flags import POSITIVE, ConfigResolver, option
from megatron.config.sections import KeysAndValues

if TYPE_CHECKING:
    from megatron.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class GlobalHeadsConfig(ModelPart):
    """Attention heads in blocks without a sliding window."""

    global_kv_channels: int | None = option(None, bounds=POSITIVE, role="weights")
    """Head size in blocks without a sliding window, if it differs from --kv-channels."""
    global_num_query_groups: int | None = option(None, bounds=POSITIVE, role="weights")
    """Number of key and value heads in blocks without a sliding window, if it differs from
    --num-query-groups."""
    global_keys_as_values: bool = option(False, role="weights")
    """Use the keys, before their norm and rotation, as values in blocks without a sliding window.
    These blocks have no value projection."""
    value_norm: bool = option(False, role="results")
    """Divide the values of each head by their root mean square. Needs --qk-layernorm."""
    block_scalar: bool = option(False, role="weights")
    """Multiply the hidden states after each block by an untrained scalar from the checkpoint."""

    families: ClassVar[frozenset[str]] = frozenset({"gpt"})

    @property
    def idle(self) -> bool:
        return self == type(self)()

    @property
    def replaces_attention(self) -> bool:
        """True if some blocks have heads or values that the core's attention does not support."""
        return replace(self, block_scalar=False) != type(self)()

    def memory(self, layer: int, model: ModelConfig, tensor_size: int) -> KeysAndValues | None:
        if not self.replaces_attention:
            return None
        attention = of_block(model, layer).attention
        return KeysAndValues(
            max(1, attention.num_query_groups // tensor_size), attention.kv_channels
        )

    def resolve(
        self, layers: int, seq_length: int, longest: int | None, resolver: ConfigResolver
    ) -> GlobalHeadsConfig:
        values: dict[str, Any] = dict(resolver.values)
        heads, groups = values["num_attention_heads"], self.global_num_query_groups
        resolver.check(
            groups is None or heads % groups == 0,
            f"{resolver.show('global_num_query_groups')} must divide "
            f"{resolver.show('num_attention_heads')}",
        )
        normed = values["qk_layernorm"] and not values["qk_layernorm_after_rope"]
        resolver.check(
            normed or not self.value_norm,
            "--value-norm needs --qk-layernorm, without --qk-layernorm-after-rope",
        )
        for name in ("multi_latent_attention", "experimental_attention_variant",
                     "hybrid_layer_pattern"):  # fmt: skip
            resolver.check(
                not (self.replaces_attention and values.get(name)),
                f"{resolver.flag(name)} contradicts flags of the heads in blocks without a window "
                "(--global-kv-channels and others), which are for attention alone; leave one out",
            )
        return self


def of_block(model: ModelConfig, layer: int) -> ModelConfig:
    """Return the model's configuration as if all blocks had the heads of block ``layer``."""
    part, attention = model.part(GlobalHeadsConfig), model.attention
    if attention.window(layer) is not None:
        return model
    width = part.global_kv_channels or attention.kv_channels
    groups = part.global_num_query_groups or attention.num_query_groups
    return replace(model, attention=replace(attention, kv_channels=width, num_query_groups=groups))


def keys_are_values(model: ModelConfig, layer: int) -> bool:
    """Return whether a block uses its keys as values."""
    part = model.part(GlobalHeadsConfig)
    return part.global_keys_as_values and model.attention.window(layer) is None
