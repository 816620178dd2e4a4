"""Main weights and moments of the optimizer in fewer than 32 bits."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature


class LowBitStates(Feature):
    def stored_states(self, config: Any) -> Any:
        if config.precision.states is None:
            return None
        from megatron.features.low_bit_states.stored_states import StoredStates

        return StoredStates(config.precision.states)


FEATURE = LowBitStates()
