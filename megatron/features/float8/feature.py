"""Feature that computes linear layers in 8-bit floating point (FP8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.float8.flags import Float8Flags, check_float8_flags


class Float8Kernels(Feature):
    flag_parts = {"fast_paths": Float8Flags}

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        micro_batch, bf16 = config.training.micro_batch_size, config.precision.bf16
        layout, paths = config.parallel, config.fast_paths
        check_float8_flags(paths, config.model, layout, micro_batch, bf16, resolver)

    def check_device(self, config: Any, device: Any) -> None:
        if config.fast_paths.in_8_bits:
            from megatron.features.float8.kernels import check_float8

            check_float8(config, device)

    def kernels(self, blocks: Sequence[Any], config: Any) -> None:
        if config.fast_paths.in_8_bits:
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
        if not config.fast_paths.in_8_bits:
            return None
        from megatron.features.float8.state import Float8State

        return Float8State(blocks, names, config.fast_paths, mesh, partitioned)


FEATURE = Float8Kernels()
