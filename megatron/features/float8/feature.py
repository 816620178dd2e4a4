"""Linear layers that multiply in 8-bit floating point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.features import Feature


class Float8Kernels(Feature):
    def check_device(self, config: Any, device: Any) -> None:
        if config.fast_paths.fp8_format is not None:
            from megatron.features.float8.kernels import check_float8

            check_float8(config, device)

    def kernels(self, blocks: Sequence[Any], config: Any) -> None:
        if config.fast_paths.fp8_format is not None:
            from megatron.features.float8.kernels import use_float8

            use_float8(blocks, config)

    def kernel_states(
        self,
        blocks: Sequence[Any],
        names: Mapping[Any, str],
        config: Any,
        mesh: Any,
        partitioned: bool,
    ) -> Any:
        if config.fast_paths.fp8_format is None:
            return None
        from megatron.features.float8.state import Float8State

        return Float8State(blocks, names, config.fast_paths, mesh, partitioned)


FEATURE = Float8Kernels()
