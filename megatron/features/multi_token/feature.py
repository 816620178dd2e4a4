"""Feature that adds multi-token prediction."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.multi_token.flags import MultiTokenConfig


class MultiTokenFeature(Feature):
    model_parts = (MultiTokenConfig,)
    # these features replace the losses that this one extends
    after = ("instruction", "preference", "distillation")

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.model.part(MultiTokenConfig).check_run(config, resolver)

    def network(self, spec: Any, model: Any, parallel: Any) -> Any:
        if model.part(MultiTokenConfig).idle or model.head != "lm":
            return spec
        from megatron.features.multi_token.layers import with_blocks_ahead

        return with_blocks_ahead(spec, model, parallel)

    def model(self, spec: Any, config: Any) -> Any:
        if config.model.part(MultiTokenConfig).idle:
            return spec
        from megatron.features.multi_token.layers import with_losses_ahead

        return with_losses_ahead(spec, config.model)


FEATURE = MultiTokenFeature()
