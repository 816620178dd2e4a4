"""Flag to continue a run although its inputs have changed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.features import FlagPart
from megatron.config.flags import needs_value, option


@dataclass(frozen=True, kw_only=True)
class ChangedDataFlags(FlagPart):
    """Changes of a run's inputs."""

    allow_changed_data: bool = option(False, needs=needs_value("load", refused=False))
    """Continue from a checkpoint although the content of data files, or of the models that the run
    learns from (reference, teacher), has changed since it was saved. Without this flag a change is
    an error. Other paths with the same content are always accepted."""
