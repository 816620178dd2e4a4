"""The command ``to-peft`` of ``tools/convert_checkpoint.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.source import DTYPES
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.features.adapters.checkpoint import AdaptedSource
from megatron.features.adapters.peft import CONFIG, PeftFolder, write_peft
from megatron.formats.conversion.commands import (
    LoadConfig,
    located,
    parsed,
    require_equal,
    required,
)
from megatron.formats.conversion.output import published


@dataclass(frozen=True)
class ToPeftConfig:
    """Conversion of adapters to peft."""

    output: str | None = option(None)
    """Folder for the adapters; it must be new or empty."""
    base_model: str | None = option(None, derived="the base, if it is of Hugging Face")
    """Name or path of the base that the result names, for example meta-llama/Llama-2-7b-hf."""
    dtype: str = option("float32", choices=tuple(DTYPES))
    """dtype of the adapters."""
    overwrite: bool = option(False)
    """Replace the adapters in --output."""


def to_peft(argv: Sequence[str]) -> None:
    """Writes the adapters, and reads them back, before the result gets its name. Raises
    ConfigError, CheckpointError or OSError."""
    checkpoint, config = parsed(
        argv, "to-peft", "Writes the adapters of a checkpoint as a folder of peft.",
        LoadConfig, ToPeftConfig,
    )  # fmt: skip
    required(checkpoint, "load")
    output, located_checkpoint = Path(required(config, "output")), located(checkpoint)
    if not located_checkpoint.form.on_base:
        raise ConfigError(
            f"--load {checkpoint.load} has a whole model, not adapters: to-hf writes it for "
            "transformers"
        )
    source = located_checkpoint.open()
    assert isinstance(source, AdaptedSource)
    with published(output, config.overwrite, located_checkpoint.folder, marks=(CONFIG,)) as folder:
        count = write_adapters(source, folder, config.base_model, DTYPES[config.dtype])
    print(
        f"{output}: {count} tensors of {source.folder} in {config.dtype}, read back and equal; "
        f"base: {source.base.folder}"
    )


def write_adapters(
    source: AdaptedSource, folder: Path, base: str | None = None, dtype: torch.dtype = torch.float32
) -> int:
    """:func:`write_peft` with the tokenizer's files into an existing folder, read back. Raises
    CheckpointError if what is read differs."""
    count = write_peft(source, folder, base, dtype)
    written = PeftFolder(folder, source.base.folder).additions
    require_equal(written, source.additions, dtype, folder)
    place = folder / "tokenizer"
    if source.copy_tokenizer(place):
        for path in place.iterdir():
            if path.name == "generation_config.json":
                path.unlink()
            else:
                path.rename(folder / path.name)
        place.rmdir()
    return count
