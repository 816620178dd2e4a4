"""Feature that stores the optimizer's main weights and moments in fewer than 32 bits."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.low_bit_states.flags import StoredStatesFlags
from megatron.util.processes import is_main_process


class LowBitStates(Feature):
    flag_parts = {"precision": StoredStatesFlags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        config.precision.check_states(config, resolver)

    def stored_states(self, config: Any, trained: Any, mesh: Any, device: Any) -> Any:
        if config.precision.states is None:
            return None
        from megatron.features.low_bit_states.stored_states import (
            StoredStates,
            keys_of,
            states_line,
        )

        if is_main_process():
            print(states_line(config.precision.states, device), flush=True)
        keys = keys_of(trained, config.training.seed, mesh.coordinates)
        return StoredStates(config.precision.states, keys)


FEATURE = LowBitStates()
