"""What the stages of a project work with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron.apps.retro.config import RetroPreprocessConfig
from megatron.apps.retro.embedding import Embedder, build_embedder
from megatron.apps.retro.gpt_run import project_run, settings_beside_gpt
from megatron.config import ConfigError, Settings
from megatron.features.retro.chunks import ChunkDatabase
from megatron.features.retro.project import RetroProject
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer

EMBEDDER = "retro_embedder"
"""Name in ``config.json`` of what the vectors depend on."""


@dataclass(frozen=True)
class Preprocessing:
    """A project, the flags of its tool, completed by its ``config.json``, and those of training
    beside them."""

    project: RetroProject
    config: RetroPreprocessConfig
    settings: Settings

    @cached_property
    def run(self) -> Run:
        """The run of a GPT whose samples get neighbours."""
        return project_run(self.project, self.settings)

    @property
    def tokenizer(self) -> Tokenizer:
        """The GPT's."""
        return self.run.tokenizer

    @cached_property
    def database(self) -> ChunkDatabase:
        """The chunks of the training documents; errors as of ``RetroProject.database``."""
        return self.project.database(self.tokenizer.eod)

    @cached_property
    def embedder(self) -> Embedder:
        """The embedder of the flags. ConfigError if it is not the one that the project began
        with."""
        found = build_embedder(self.config, settings_beside_gpt(self.config, self.settings))
        identity = dict(found.identity)
        before = self.project.settings.get(EMBEDDER)
        if before is None:
            self.project.record({EMBEDDER: identity})
        elif before != identity:
            keys = [key for key in identity | before if identity.get(key) != before.get(key)]
            told = ", ".join(f"{key} {identity.get(key)} is not {before.get(key)}" for key in keys)
            raise ConfigError(
                f"the embedder is not the one of {self.project.config_file}: {told}; name that one "
                "(--bert-embedder-type, --bert-load), or make another --retro-project-dir"
            )
        return found
