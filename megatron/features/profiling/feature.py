"""Recording of steps, for tables and for Perfetto."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.profiling.flags import ProfilingConfig, resolve_profiling


class ProfilingFeature(Feature):
    sections = {"profiling": ProfilingConfig}

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        length, save = parts["training"].train_iters, parts["checkpoint"].save
        flags = parts["profiling"]
        parts["profiling"] = resolve_profiling(flags, processes, length, save, resolver)


FEATURE = ProfilingFeature()
