"""Feature that moves partitioned states between memory tiers, as the DeepSpeed JSON requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.features import Feature


class TiersFeature(Feature):
    def check_engine(self, content: Mapping[str, Any], config: Any) -> Sequence[str]:
        from megatron.features.tiers import rules

        rules.check_offload(content, config)
        rules.check_zero_plus(content, config)
        return rules.notes(content, config)

    def engine_settings(self, settings: dict[str, Any], on_cpu: bool) -> None:
        from megatron.features.tiers import rules

        rules.check_device(settings, on_cpu)
        rules.leave_to_us(settings)

    def built(self, engine: Any) -> None:
        zero = engine.content.get("zero_optimization") or {}
        from megatron.features.tiers.rules import OFFLOADS, on_disk, ratio

        if any(on_disk(zero, key) for key in OFFLOADS):
            from megatron.features.tiers.places import move_to_files

            move_to_files(engine, zero)
        if ratio(zero) < 1:
            from megatron.features.tiers.places import move_to_device

            move_to_device(engine, ratio(zero))

    def ready(self, context: Any) -> None:
        from megatron.features.tiers.rules import OFFLOADS, ZERO, on_disk

        zero = context.engine.content.get(ZERO) or {}
        if any(on_disk(zero, key) for key in OFFLOADS):
            from megatron.features.tiers.places import check_of

            context.checks.append(check_of(context.engine, context.newest_shown))


FEATURE = TiersFeature()
