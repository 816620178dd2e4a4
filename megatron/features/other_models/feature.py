"""Feature for runs that start from a checkpoint with a different head, of their base family, or
with different multi-token prediction blocks."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class OtherModels(Feature):
    def fresh_parts(self, engine: Any, source: Any, weights_only: bool) -> tuple[str, ...] | None:
        from megatron.features.other_models.parts import fresh_parts

        return fresh_parts(engine, source, weights_only)


FEATURE = OtherModels()
