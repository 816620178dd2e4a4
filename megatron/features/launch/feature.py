"""Runs that start their own processes, or are started by srun or mpirun; folders of many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import Settings


class LaunchFeature(Feature):
    def launch(self, settings: Settings, argv: Sequence[str] | None) -> int | None:
        from megatron.features.launch.processes import launch

        return launch(settings, argv)

    def begin(self, context: Any) -> None:
        from megatron.parallel import agreement

        if agreement.on_several_nodes():
            from megatron.features.launch.folders import check_folders

            check_folders(context.config)


FEATURE = LaunchFeature()
