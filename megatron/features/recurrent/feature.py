"""Feature for recurrent layers (Mamba-2 and Gated DeltaNet), alone or mixed with attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver, Settings
from megatron.features.recurrent.flags import DeltaConfig, MambaConfig
from megatron.features.recurrent.pattern import DELTA, MAMBA, PatternConfig, with_pattern


class RecurrentFeature(Feature):
    needs = ("experts",)
    model_parts = (PatternConfig, DeltaConfig, MambaConfig)

    def complete(self, settings: Settings, run_of: Callable[[Settings], Any]) -> Settings:
        """Add the settings that a pattern implies: the number of layers, and the layers with
        experts."""
        return with_pattern(settings)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.model.part(DeltaConfig).check_run(config.model.family, config.parallel, resolver)
        config.model.part(MambaConfig).check_run(config, resolver)

    def architectures(self) -> Sequence[Any]:
        from megatron.features.recurrent.huggingface import bamba, nemotron_h, qwen3_next

        return bamba.BAMBA, nemotron_h.NEMOTRON_H, *qwen3_next.ARCHITECTURES

    def mixer(self, config: Any, layer: int, tp: Any, recompute: bool) -> Any:
        mixer = config.part(PatternConfig).mixer(layer)
        if mixer == DELTA:
            from megatron.features.recurrent.delta_layer import GatedDeltaNet

            return GatedDeltaNet(config, layer, tp, recompute)
        if mixer == MAMBA:
            from megatron.features.recurrent.mamba_layer import Mamba2

            return Mamba2(config, layer, tp, recompute)
        return None

    def shape(self, shape: Any, config: Any) -> Any:
        if config.model.part(PatternConfig).idle:
            return shape
        from megatron.features.recurrent.costs import with_states

        return with_states(shape, config.model)


FEATURE = RecurrentFeature()
