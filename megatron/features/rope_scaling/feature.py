"""Feature that checks runs continuing a checkpoint with other RoPE scaling or longer sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature


class RopeScalingFeature(Feature):
    def check_source(self, config: Any, source: Any) -> None:
        if source is None or config.model.positions.rope_scaling.is_default:
            return
        before = source.found.open(verify=False)
        self.check_weights(before.model, config.model, str(before.folder))

    def check_weights(self, before: Any, now: Any, where: str) -> None:
        from megatron.features.rope_scaling.longer import check_scaling

        check_scaling(before, now, where)

    def loaded(self, engine: Any, origin: Any, source: Any) -> Sequence[str]:
        from megatron.features.rope_scaling.longer import unscaled_note

        return unscaled_note(source.model, engine.config.model)


FEATURE = RopeScalingFeature()
