"""The commands ``to-deepspeed``, ``to-universal`` and ``to-gguf``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from megatron.formats.tensors import DTYPES
from megatron.util.files import sync_path
from megatron.util.progress import say


@dataclass(frozen=True)
class ToDeepSpeedConfig:
    """Conversion to Megatron-DeepSpeed's checkpoint layout."""

    output: str | None = option(None)
    """Checkpoint folder to write to, which becomes --load of a Megatron-DeepSpeed run with
    --no-pipeline-parallel."""
    target_tensor_parallel_size: int = option(1)
    """Tensor-parallel size of the written checkpoint. Experts are not sharded over tensor-parallel
    ranks."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights."""


def to_deepspeed(argv: Sequence[str]) -> None:
    """Convert to Megatron-DeepSpeed's layout, with a file for each expert, and read the result
    back. Raises ConfigError if a flag is missing or wrong. Raises ValueError if the layout does not
    support the network, and CheckpointError if the checkpoint is damaged or a value that is read
    back differs."""
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
    """Conversion to DeepSpeed's universal checkpoint format."""

    output: str | None = option(None)
    """Folder to create, for example checkpoints/global_step100_universal. The pointer file
    latest_universal is written next to it."""
    zero_stage: int = option(1, choices=(1, 2, 3))
    """ZeRO stage of the runs that will load the checkpoint. The format is the same for stages 1 and
    2."""


def to_universal(argv: Sequence[str]) -> None:
    """Convert to DeepSpeed's universal format. Raises ConfigError if a flag is missing or wrong,
    and CheckpointError if the checkpoint does not exist or is damaged."""
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
    """Tensor type of the weights. q8_0 stores blocks of 32 8-bit values with a scale; tensors whose
    row length is not a multiple of 32 become f16. Vectors are always f32."""
    overwrite: bool = option(False)
    """Replace the file in --output if it exists."""


def to_gguf(argv: Sequence[str]) -> None:
    """Convert to a GGUF file, which is read back before it is published. Raises ConfigError if a
    flag is missing or wrong. Raises ValueError if llama.cpp does not support the network, and
    CheckpointError if the checkpoint is damaged or a value that is read back differs."""
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
