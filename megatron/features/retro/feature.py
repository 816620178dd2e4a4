"""Feature that adds RETRO: models that attend to retrieved neighbours of their input text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.retro.flags import RetrievalConfig, RetroDataConfig


class RetroFeature(Feature):
    needs = ("cross_attention", "inputs")
    sections = {"retro": RetroDataConfig}
    model_parts = (RetrievalConfig,)
    families = ("retro",)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        resolver.check(
            config.model.family != "retro" or config.parallel.context_parallel_size == 1,
            f"{resolver.show('context_parallel_size')}: the chunks of a Retro read whole "
            "neighbours, which are not divided over ranks; leave it out, and use "
            "--tensor-model-parallel-size with --sequence-parallel, which divides activations",
        )

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        project = config.section(RetroDataConfig).retro_project_dir
        if project is None:
            return {}
        from megatron.features.inputs.compared import file_input
        from megatron.formats.digests import digest_of_files

        folder = Path(project)
        files = [*folder.glob("db/merged/*.hdf5"), *folder.glob("query/*/*.hdf5")]
        return {"retrieval project": file_input(project, folder, digest_of_files(folder, files))}

    def family(self, name: str) -> Any:
        from megatron.features.retro.family import FAMILY

        return FAMILY


FEATURE = RetroFeature()
