#!/usr/bin/env python
"""Converts checkpoints to the forms of other projects.

    python tools/convert_checkpoint.py to-hf --load checkpoints --output hf

The result is compared with the checkpoint, logit by logit, before it gets its name.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import verify
from megatron.checkpoint.huggingface.compare import ATOL, RTOL, Comparison, compare_logits
from megatron.checkpoint.huggingface.export import DTYPES, write_model
from megatron.checkpoint.huggingface.folder import published
from megatron.checkpoint.reader import CheckpointReader
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.inference.load import model_of, training_dtype

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ToHFConfig:
    """Conversion to Hugging Face."""

    load: str | None = option(None)
    """Folder of checkpoints, or one checkpoint."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint."""
    output: str | None = option(None)
    """Folder for the model; it must be new or empty."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """Number format of the weights."""
    max_shard_size: str = option("5GB")
    """Largest safetensors file, for example 500MB, 5GB or 4GiB."""
    overwrite: bool = option(False)
    """Replace a model that --output holds."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else None
    if command in ("-h", "--help"):
        print(__doc__.strip() + "\n\nCommands (each has --help): " + ", ".join(COMMANDS))
        return
    try:
        if command not in COMMANDS:
            raise ConfigError(f"{command or 'no command'}: the commands are {', '.join(COMMANDS)}")
        COMMANDS[command](arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"convert_checkpoint.py: error: {error}")


def to_hf(argv: Sequence[str]) -> None:
    (config,) = parse_configs(
        (ToHFConfig,),
        argv,
        prog="convert_checkpoint.py to-hf",
        description="Writes a checkpoint as a model of Hugging Face.",
    )
    missing = [flag for flag in ("load", "output") if getattr(config, flag) is None]
    if missing:
        raise ConfigError(f"--{missing[0]} is missing")
    shard_bytes = parse_size(config.max_shard_size)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("to-hf needs transformers: pip install transformers")
    iteration = None if config.iteration is None else str(config.iteration)
    reader = CheckpointReader.newest(config.load, iteration)
    dtype = config.dtype or str(training_dtype(reader.config)).removeprefix("torch.")
    with published(Path(config.output), config.overwrite, reader.folder) as folder:
        verify(reader.folder)
        write_model(reader, folder, dtype, shard_bytes, progress=print)
        result = compare_with_source(reader, folder, DTYPES[dtype])
        if not result.agree:
            raise CheckpointError(
                f"transformers computes other logits than the checkpoint {reader.folder}: the "
                f"largest difference is {result.largest:.3g} (allowed {ATOL:g} + {RTOL:g} x "
                f"logit); --output {config.output} is not written"
            )
    print(
        f"{config.output}: {reader.folder} in {dtype}; logits of {result.tokens} tokens agree, "
        f"largest difference {result.largest:.2g} of logits up to {result.magnitude:.3g} "
        f"(computed in {str(result.dtype).removeprefix('torch.')})"
    )


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB (10^9) or 4GiB (2^30)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)?", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2] or "B"]) if match and match[2] != "IB" else 0
    if size < 1:
        raise ConfigError(
            f"--max-shard-size {text} is no size; write it as 500MB, 5GB or 4GiB, or in bytes"
        )
    return size


def compare_with_source(reader: CheckpointReader, folder: Path, dtype: torch.dtype) -> Comparison:
    """Compares the exported model with the checkpoint, whose weights are rounded like its own."""
    model = model_of(reader, dtype, torch.device("cpu")).float()
    return compare_logits(model, folder, reader.config.model)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"to-hf": to_hf}

if __name__ == "__main__":
    main()
