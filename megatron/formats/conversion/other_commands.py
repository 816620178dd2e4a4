"""``to-deepspeed``, ``to-universal`` and ``to-gguf``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.source import DTYPES
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.formats.conversion.commands import (
    LoadConfig,
    dtype_of,
    located,
    opened,
    parsed,
    require_equal,
    required,
)
from megatron.formats.conversion.output import need
from megatron.formats.deepspeed_folders.folder import (
    UNIVERSAL_TRACKER,
    DeepSpeedFolder,
    is_universal,
)
from megatron.formats.deepspeed_folders.megatron_deepspeed import write_megatron_deepspeed
from megatron.formats.deepspeed_folders.universal import write_universal
from megatron.formats.inspection import counted
from megatron.util.files import sync_path
from megatron.util.progress import say


@dataclass(frozen=True)
class ToDeepSpeedConfig:
    """Conversion to the folder of a Megatron-DeepSpeed run."""

    output: str | None = option(None)
    """Folder of checkpoints to write in: --load of a run of Megatron-DeepSpeed with
    --no-pipeline-parallel."""
    target_tensor_parallel_size: int = option(1)
    """Tensor-parallel size to write for. Experts are not cut over tensor-parallel ranks."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights."""


def to_deepspeed(argv: Sequence[str]) -> None:
    """Converts to Megatron-DeepSpeed's layout, a file for each expert, and reads the result back.
    Raises ConfigError if a flag is missing or wrong; ValueError or CheckpointError if the network
    has no such form, the checkpoint is damaged, or what is read back differs."""
    checkpoint, config = parsed(
        argv, "to-deepspeed", "Writes a checkpoint in the layout of Megatron-DeepSpeed.",
        LoadConfig, ToDeepSpeedConfig,
    )  # fmt: skip
    output, source = Path(required(config, "output")), opened(checkpoint)
    source.require_model()
    dtype, size = config.dtype or dtype_of(source), config.target_tensor_parallel_size
    folder = write_megatron_deepspeed(source, output, size, dtype, progress=say)
    require_equal(DeepSpeedFolder(folder), source, DTYPES[dtype], folder)
    print(
        f"{folder}: {source.folder} in {dtype} for tensor-parallel size {size}; {counted(source)}, "
        "read back and equal, bit by bit"
    )
    print("it has weights only: load it with --no-load-optim --no-load-rng or --finetune")


@dataclass(frozen=True)
class ToUniversalConfig:
    """Conversion to DeepSpeed's universal checkpoint."""

    output: str | None = option(None)
    """Folder to create, for example checkpoints/global_step100_universal; latest_universal next to
    it will name it."""
    zero_stage: int = option(1, choices=(1, 2, 3))
    """ZeRO stage of the scripts that will load it; 1 and 2 load the same."""


def to_universal(argv: Sequence[str]) -> None:
    """Converts to DeepSpeed's universal format. Raises ConfigError if a flag is missing or wrong;
    CheckpointError if the checkpoint does not exist, or is damaged."""
    checkpoint, config = parsed(
        argv, "to-universal", "Writes a checkpoint as DeepSpeed's universal one, for "
        "load_universal.", LoadConfig, ToUniversalConfig,
    )  # fmt: skip
    required(checkpoint, "load")
    output = Path(required(config, "output"))
    if output.exists() and not (output.is_dir() and is_universal(output)):
        raise ConfigError(
            f"--output {output} exists and is not a universal checkpoint; name a new folder"
        )
    located_checkpoint = located(checkpoint)
    if output.resolve() == located_checkpoint.folder.resolve():
        raise ConfigError(f"--output {output} is the checkpoint that is read")
    write_universal(located_checkpoint.open(), output, config.zero_stage)
    stages = "3" if config.zero_stage == 3 else "1 and 2"
    print(
        f"{output}: {located_checkpoint.folder} for loaders of ZeRO stages {stages}; "
        f"{output.parent / UNIVERSAL_TRACKER} names it"
    )


TYPES = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True)
class ToGGUFConfig:
    """Conversion to llama.cpp."""

    output: str | None = option(None)
    """GGUF file to create, for example model.gguf."""
    type: str = option("f16", choices=TYPES)
    """Type of the weights. q8_0 has a scale for each 32 numbers of 8 bits; rows that are no
    multiple of 32 are then f16. Vectors are always f32."""
    overwrite: bool = option(False)
    """Replace the file --output."""


def to_gguf(argv: Sequence[str]) -> None:
    """Converts to a GGUF file, which is read back before it gets its name. Raises ConfigError if a
    flag is missing or wrong; ValueError or CheckpointError if llama.cpp has no such network, the
    checkpoint is damaged, or what is read back differs."""
    checkpoint, config = parsed(
        argv, "to-gguf", "Writes a checkpoint as a GGUF file of llama.cpp.", LoadConfig,
        ToGGUFConfig,
    )  # fmt: skip
    required(checkpoint, "load")
    output = Path(required(config, "output"))
    if output.suffix != ".gguf":
        raise ConfigError(f"--output {output}: the name of the file must end with .gguf")
    if output.exists() and not (config.overwrite and output.is_file()):
        raise ConfigError(f"--output {output} exists; give --overwrite, or name a new file")
    need("to-gguf", "gguf")
    from megatron.formats.gguf.writer import write_gguf

    source = opened(checkpoint)
    source.require_model()
    if output.exists() and output.samefile(source.folder):
        raise ConfigError(f"--output {output} is the checkpoint that is read")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.tmp.gguf")
    try:
        write_gguf(source, temporary, config.type, progress=say)
        sync_path(temporary)
        os.replace(temporary, output)
        sync_path(output.parent)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{output}: {source.folder} as {config.type}")
