"""``from-hf``: a model of Hugging Face as a checkpoint that any layout trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.writer import write_checkpoint
from megatron.config import parse_configs
from megatron.config.flags import option
from megatron.formats.conversion.needs import need, required
from megatron.formats.conversion.to_hf import parse_size
from megatron.formats.huggingface.compare import ATOL, RTOL, compare_logits
from megatron.formats.huggingface.folder import published
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.inference.load import model_of
from megatron.util.progress import say


@dataclass(frozen=True)
class FromHFConfig:
    """Conversion from Hugging Face."""

    input: str | None = option(None)
    """Folder with config.json, weights, and the tokenizer's files if there are any."""
    output: str | None = option(None)
    """Folder of checkpoints to make; it must be new or empty."""
    max_shard_size: str = option("5GB")
    """Largest safetensors file, for example 500MB, 5GB or 4GiB."""
    overwrite: bool = option(False)
    """Replace checkpoints that --output holds."""


def from_hf(argv: Sequence[str]) -> None:
    """Converts, compares logits, and gives the result its name only if they agree.

    Raises:
        ConfigError: a flag is missing or wrong, or a package is not installed.
        CheckpointError: the model cannot be read or represented, or the logits differ.
    """
    (config,) = parse_configs(
        (FromHFConfig,),
        argv,
        prog="convert_checkpoint.py from-hf",
        description="Writes a model of Hugging Face as a checkpoint.",
    )
    path, output = Path(required(config, "input")), Path(required(config, "output"))
    shard_bytes = parse_size(config.max_shard_size)
    need("from-hf", "transformers")
    if HuggingFaceFolder.locate(path, None) is None:
        missing = "config.json" if path.is_dir() else "such folder"
        raise CheckpointError(f"--input {path}: there is no {missing}; name a downloaded model")
    source = HuggingFaceFolder(path)
    with published(output, config.overwrite, path, mark=MEGATRON_TRACKER) as folder:
        if source.tokenizer is None:
            print(
                f"no tokenizer: {path} has no tokenizer files, so training needs --tokenizer-type "
                "and its files"
            )
        # The checkpoint is to use its own copy of the tokenizer, wherever it is moved.
        source.tokenizer = None
        written = write_checkpoint(
            folder, source, iteration=0, moments=False, max_file_bytes=shard_bytes, progress=say
        )
        ours = model_of(CheckpointReader(written), torch.float32, torch.device("cpu"))
        result = compare_logits(ours, path, source.model, strict=False)
        if not result.agree:
            raise CheckpointError(
                f"the checkpoint computes other logits than transformers with {path}: the largest "
                f"difference is {result.largest:.3g} (allowed {ATOL:g} + {RTOL:g} x logit); "
                f"--output {output} is not written"
            )
    print(
        f"{output}: {source.architecture.title} of {path}, {len(source.names())} parameters; "
        f"{result}"
    )
    print(f"train on it with --load {output} --use-checkpoint-args")
