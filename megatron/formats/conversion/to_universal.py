"""``to-universal``: any checkpoint as DeepSpeed's universal one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.formats.conversion.needs import required
from megatron.formats.deepspeed_folders.layout import UNIVERSAL_TRACKER, is_universal
from megatron.formats.deepspeed_folders.universal_writer import write_universal
from megatron.util.progress import say


@dataclass(frozen=True)
class ToUniversalConfig:
    """Conversion to DeepSpeed's universal checkpoint."""

    load: str | None = option(None)
    """Folder of checkpoints, or one checkpoint, of any format."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint."""
    output: str | None = option(None)
    """Folder to make, for example checkpoints/global_step100_universal; latest_universal beside it
    will name it."""
    zero_stage: int = option(1, choices=(1, 2, 3))
    """ZeRO stage of the scripts that will load it; 1 and 2 load the same."""


def to_universal(argv: Sequence[str]) -> None:
    """Converts a checkpoint.

    Raises:
        ConfigError: a flag is missing or wrong.
        CheckpointError: the checkpoint is not there, or damaged.
    """
    (config,) = parse_configs(
        (ToUniversalConfig,),
        argv,
        prog="convert_checkpoint.py to-universal",
        description="Writes a checkpoint as DeepSpeed's universal one, for load_universal.",
    )
    load, output = required(config, "load"), Path(required(config, "output"))
    if output.exists() and not (output.is_dir() and is_universal(output)):
        raise ConfigError(
            f"--output {output} is there and no universal checkpoint; name a new folder"
        )
    wanted = None if config.iteration is None else str(config.iteration)
    found = locate_checkpoint(load, wanted)
    if found is None:
        raise CheckpointError(f"--load {load}: there is no checkpoint")
    if output.resolve() == found.folder.resolve():
        raise ConfigError(f"--output {output} is the checkpoint that is read")
    source = found.open()
    write_universal(source, output, config.zero_stage, progress=say)
    stages = "3" if config.zero_stage == 3 else "1 and 2"
    print(
        f"{output}: {found.folder} for loaders of ZeRO stages {stages}; "
        f"{output.parent / UNIVERSAL_TRACKER} names it"
    )
