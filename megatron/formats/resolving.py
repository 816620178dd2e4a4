"""The network that another program's checkpoint describes."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.config import ConfigError, ModelConfig, ModelFlags


def resolved(flags: ModelFlags, where: Path) -> ModelConfig:
    """The network that flags ask for, which were read from a file.

    Args:
        flags: the flags.
        where: the file, for messages.

    Raises:
        CheckpointError: there is no such network here.
    """
    try:
        return flags.resolve()
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
