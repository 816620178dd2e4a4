"""Main weights and moments of the optimizer in fewer than 32 bits."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.low_bit_states.flags import StoredStatesFlags


class LowBitStates(Feature):
    flag_parts = {"precision": StoredStatesFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.precision.check_states(config, resolver)

    def stored_states(self, config: Any) -> Any:
        if config.precision.states is None:
            return None
        from megatron.features.low_bit_states.stored_states import StoredStates

        return StoredStates(config.precision.states)


FEATURE = LowBitStates()
