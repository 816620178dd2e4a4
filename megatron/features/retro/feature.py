"""Retro: models that read the neighbours of their samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.features import Feature
from megatron.features.retro.flags import RetrievalConfig, RetroDataConfig


class RetroFeature(Feature):
    sections = {"retro": RetroDataConfig}
    model_parts = (RetrievalConfig,)
    families = ("retro",)

    def inputs(self, config: Any) -> Mapping[str, Mapping[str, str]]:
        project = config.section(RetroDataConfig).retro_project_dir
        if project is None:
            return {}
        from megatron.run.fingerprint import digest_of_files, file_input

        folder = Path(project)
        files = [*folder.glob("db/merged/*.hdf5"), *folder.glob("query/*/*.hdf5")]
        return {"retrieval project": file_input(project, folder, digest_of_files(folder, files))}

    def family(self, name: str) -> Any:
        from megatron.features.retro.family import FAMILY

        return FAMILY


FEATURE = RetroFeature()
