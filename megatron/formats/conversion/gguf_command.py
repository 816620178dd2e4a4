"""``to-gguf``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.formats.conversion.commands import LoadConfig, opened, parsed, required
from megatron.formats.conversion.output import need
from megatron.util.files import sync_path
from megatron.util.progress import say

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
