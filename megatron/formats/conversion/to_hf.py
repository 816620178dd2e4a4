"""``to-hf``: a checkpoint of any format as a model of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import DTYPES, Source, locate_checkpoint
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.formats.conversion.hub import check_hub, push
from megatron.formats.conversion.needs import dtype_of, need, required
from megatron.formats.huggingface.compare import ATOL, RTOL, Comparison, compare_logits
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.folder import published
from megatron.inference.load import model_of
from megatron.util.progress import say

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class ToHFConfig:
    """Conversion to Hugging Face."""

    load: str | None = option(None)
    """Folder of checkpoints, or one checkpoint, of any format."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint."""
    output: str | None = option(None)
    """Folder for the model; it must be new or empty."""
    architecture: str | None = option(
        None, derived="what the weights were read from, or else the plainest that the model fits"
    )
    """model_type to write, for example mistral."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """Number format of the weights."""
    max_shard_size: str = option("5GB")
    """Largest safetensors file, for example 500MB, 5GB or 4GiB."""
    overwrite: bool = option(False)
    """Replace a model that --output holds."""
    push_to_hub: str | None = option(None)
    """Repository to upload the model to, as owner/name; made if there is none. The token is that of
    `hf auth login`, or HF_TOKEN."""
    private: bool = option(False)
    """Make the repository a private one."""


def to_hf(argv: Sequence[str]) -> None:
    """Converts, compares logits, and gives the result its name only if they agree.

    Raises:
        ConfigError: a flag is missing or wrong, or a package is not installed.
        CheckpointError: the checkpoint cannot be read or converted, or the logits differ.
        OSError: the hub cannot be reached or refuses.
    """
    (config,) = parse_configs(
        (ToHFConfig,),
        argv,
        prog="convert_checkpoint.py to-hf",
        description="Writes a checkpoint as a model of Hugging Face.",
    )
    load, output = required(config, "load"), required(config, "output")
    shard_bytes = parse_size(config.max_shard_size)
    need("to-hf", "transformers")
    if config.private and config.push_to_hub is None:
        raise ConfigError("--private speaks of the repository of --push-to-hub, which is not given")
    if config.push_to_hub is not None:
        check_hub(config.push_to_hub)
    iteration = None if config.iteration is None else str(config.iteration)
    found = locate_checkpoint(load, iteration)
    if found is None:
        raise CheckpointError(f"{load}: there is no complete checkpoint")
    with published(Path(output), config.overwrite, found.folder) as folder:
        source = found.open()
        dtype = config.dtype or dtype_of(source)
        write_model(source, folder, dtype, shard_bytes, config.architecture, progress=say)
        result = _compare(source, folder, DTYPES[dtype])
        if not result.agree:
            raise CheckpointError(
                f"transformers computes other logits than the checkpoint {source.folder}: the "
                f"largest difference is {result.largest:.3g} (allowed {ATOL:g} + {RTOL:g} x "
                f"logit); --output {output} is not written"
            )
    print(f"{output}: {source.folder} in {dtype}; {result}")
    if config.push_to_hub is not None:
        print(f"pushed to {push(Path(output), config.push_to_hub, config.private)}")


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB (10^9) or 4GiB (2^30).

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or "B"]) if match and match[2] != "IB" else 0
    if size < 1:
        raise ConfigError(
            f"--max-shard-size {text} is no size; write it as 500MB, 5GB or 4GiB, or in bytes"
        )
    return size


def _compare(source: Source, folder: Path, dtype: torch.dtype) -> Comparison:
    """Compares the exported model with the checkpoint, whose weights are rounded like its own."""
    model = model_of(source, dtype, torch.device("cpu")).float()
    return compare_logits(model, folder, source.model)
