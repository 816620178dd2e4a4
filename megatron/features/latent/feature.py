"""Feature that adds multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver, Settings
from megatron.features.latent.flags import LatentConfig, LatentSpellings, with_scaling


class LatentFeature(Feature):
    needs = ("experts",)
    model_parts = (LatentConfig,)
    sections = {"latent_attention": LatentSpellings}

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        return with_scaling(settings)

    def architectures(self) -> Sequence[Any]:
        from megatron.features.latent.huggingface import ARCHITECTURES

        return ARCHITECTURES

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.model.part(LatentConfig).check_family(config.model.family, resolver)

    def mixer(self, config: Any, layer: int, tp: Any, recompute: bool) -> Any:
        if config.part(LatentConfig).idle:
            return None
        from megatron.features.latent.attention import LatentAttention

        return LatentAttention(config, layer, tp, recompute)

    def shape(self, shape: Any, config: Any) -> Any:
        if config.model.part(LatentConfig).idle:
            return shape
        from megatron.features.latent.costs import with_latents

        return with_latents(shape, config.model)


FEATURE = LatentFeature()
