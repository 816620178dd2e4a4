"""Feature that adds separate head sizes for blocks without a sliding window, as in Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.global_heads.flags import GlobalHeadsConfig


class GlobalHeadsFeature(Feature):
    model_parts = (GlobalHeadsConfig,)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        groups = config.model.part(GlobalHeadsConfig).global_num_query_groups
        size = config.parallel.tensor_model_parallel_size
        resolver.check(
            groups is None or groups % size == 0 or size % groups == 0,
            f"{resolver.show('global_num_query_groups')} and --tensor-model-parallel-size {size}: "
            "one must be a multiple of the other",
        )

    def network(self, spec: Any, model: Any, parallel: Any) -> Any:
        if not model.part(GlobalHeadsConfig).block_scalar:
            return spec
        from megatron.features.global_heads.layers import with_scalars

        return with_scalars(spec)

    def mixer(self, config: Any, layer: int, tp: Any, recompute: bool) -> Any:
        if not config.part(GlobalHeadsConfig).replaces_attention:
            return None
        from megatron.features.global_heads.layers import GlobalHeadsAttention

        return GlobalHeadsAttention(config, layer, tp, recompute)

    def shape(self, shape: Any, config: Any) -> Any:
        from megatron.features.global_heads.costs import with_global_heads

        return with_global_heads(shape, config.model)

    def architectures(self) -> Sequence[Any]:
        from megatron.features.global_heads.huggingface import GEMMA4

        return (GEMMA4,)


FEATURE = GlobalHeadsFeature()
