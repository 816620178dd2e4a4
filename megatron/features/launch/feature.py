"""Feature for runs that start their own processes or are started by srun or mpirun. It also checks
shared folders on several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver, Settings
from megatron.features.launch.flags import LaunchFlags, check_launched


class LaunchFeature(Feature):
    needs = ("agreement",)
    flag_parts = {"parallel": LaunchFlags}

    def resolve(self, parts: dict[str, Any], processes: int, resolver: ConfigResolver) -> None:
        check_launched(resolver.values, processes, resolver)

    def launch(self, settings: Settings, argv: Sequence[str] | None) -> int | None:
        from megatron.features.launch.processes import launch

        return launch(settings, argv)

    def begin(self, context: Any) -> None:
        from megatron.parallel.meeting import on_several_nodes

        if on_several_nodes():
            from megatron.features.launch.folders import check_folders

            check_folders(context.config)


FEATURE = LaunchFeature()
