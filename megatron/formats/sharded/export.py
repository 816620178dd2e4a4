"""``to-torch-dist`` and ``to-dcp``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, write_json
from megatron.checkpoint.folder import replace_folder
from megatron.checkpoint.source import DTYPES, Source
from megatron.config import ConfigError
from megatron.config.flags import option
from megatron.formats.conversion.commands import (
    LoadConfig,
    dtype_of,
    opened,
    parsed,
    require_equal,
    required,
)
from megatron.formats.conversion.output import unfinished_folder
from megatron.formats.huggingface import architecture_of
from megatron.formats.huggingface.entries import Parameter
from megatron.formats.inspection import counted
from megatron.formats.legacy_megatron.rank_files import MOMENTS
from megatron.formats.sharded.megatron_core import CoreFolder
from megatron.formats.sharded.writer import ShardedWriter, has_moments, write_torch_dist
from megatron.formats.trainers.dcp import DcpFolder
from megatron.util.files import sync_path
from megatron.util.progress import progress_bar


@dataclass(frozen=True)
class ToTorchDistConfig:
    """Conversion to Megatron-Core's torch_dist."""

    output: str | None = option(None)
    """Folder of checkpoints to write in; --load of Megatron-LM."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights; the optimizer's are float32."""
    optim: bool = option(True, off="--no-optim")
    """Write Adam's moments and float32 weights too, where the checkpoint has them."""
    distributed_optimizer: bool = option(True, off="--no-distributed-optimizer")
    """Write the optimizer's state for a run with Megatron-LM's --use-distributed-optimizer."""


def to_torch_dist(argv: Sequence[str]) -> None:
    """Converts to Megatron-Core's format, and reads the result back. Raises ConfigError if a flag
    is missing or wrong; ValueError or CheckpointError as :func:`write_torch_dist`, or if what is
    read back differs."""
    checkpoint, config = parsed(
        argv, "to-torch-dist", "Writes a checkpoint as Megatron-Core's torch_dist.",
        LoadConfig, ToTorchDistConfig,
    )  # fmt: skip
    output, source = required(config, "output"), opened(checkpoint)
    source.require_model()
    dtype = config.dtype or dtype_of(source)

    def check(folder: Path) -> None:
        written = CoreFolder(folder)
        # Float32 weights, where the optimizer's are written too, are exact.
        exact = bool(written.state) and (config.distributed_optimizer or dtype != "float32")
        require_equal(written, source, torch.float32 if exact else DTYPES[dtype], folder)
        for name in written.names():
            for kind in set(written.kinds(name)) & {*MOMENTS}:
                if not torch.equal(written.tensor(name, kind), source.tensor(name, kind)):
                    raise CheckpointError(f"{folder}: {kind} of {name} differs")

    folder = write_torch_dist(
        source, Path(output), dtype, config.optim, config.distributed_optimizer, check
    )
    moments = "weights and Adam's moments" if CoreFolder(folder).state else "weights"
    print(
        f"{folder}: {moments} of {source.folder} in {dtype}; {counted(source)}, read back and "
        "equal, bit by bit"
    )


@dataclass(frozen=True)
class ToDcpConfig:
    """Conversion to torch.distributed.checkpoint (DCP)."""

    output: str | None = option(None)
    """Folder to create."""
    architecture: str | None = option(
        None, derived="the one that the weights were read from, or else the plainest that fits"
    )
    """model_type of Hugging Face whose names the tensors get, for example mistral."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """dtype of the weights; moments are float32."""
    optim: bool = option(True, off="--no-optim")
    """Write Adam's moments too, where the checkpoint has them."""


def to_dcp(argv: Sequence[str]) -> None:
    """Converts to a sharded checkpoint with Hugging Face's names, under ``model`` and ``optim``, as
    torch's get_state_dict has them, and reads the weights back. Errors are those of
    :func:`to_torch_dist`."""
    checkpoint, config = parsed(
        argv, "to-dcp", "Writes a checkpoint of torch.distributed.checkpoint (DCP).",
        LoadConfig, ToDcpConfig,
    )  # fmt: skip
    output = Path(required(config, "output"))
    if output.exists():
        raise ConfigError(f"--output {output} exists already; name a new folder")
    source = opened(checkpoint)
    source.require_model()
    dtype = config.dtype or dtype_of(source)
    moments = write_dcp(source, output, dtype, config.optim, config.architecture)
    print(
        f"{output}: weights{' and moments' if moments else ''} of {source.folder} in {dtype}; "
        f"{counted(source)}, read back and equal, bit by bit"
    )


def write_dcp(
    source: Source, output: Path, dtype: str, moments: bool = True, architecture: str | None = None
) -> bool:
    """Writes a new folder with a config.json; returns True if moments were written. Raises
    ValueError if the model fits no architecture; CheckpointError if the source is damaged, or what
    is read back differs; OSError if a file cannot be written. Nothing is left behind then."""
    form = architecture_of(source.model, architecture)
    moments = moments and has_moments(source)
    step = torch.tensor(float(source.state.get("optimizer_step", 0)))
    with unfinished_folder(output) as partial:
        writer = ShardedWriter(partial)
        for parameter in progress_bar("writing", list(form.parameters(source.model))):
            for kind in source.kinds(parameter.ours):
                if kind != "weight" and not (moments and kind in MOMENTS):
                    continue
                values = source.tensor(parameter.ours, kind)
                for name, part in _theirs(parameter, values, kind):
                    if kind == "weight":
                        part = part.to(DTYPES[dtype], copy=True)
                        writer.add(f"model.{name}", part, path=("model", name))
                    else:
                        state = ("optim", "state", name)
                        writer.add(".".join((*state, kind)), part, path=(*state, kind))
                        if kind == MOMENTS[0]:
                            count = (*state, "step")
                            writer.add(".".join(count), step.clone(), path=count)
        for name, constant in form.constants(source.model).items():
            writer.add(f"model.{name}", constant, path=("model", name))
        writer.finish()
        write_json(partial / "config.json", form.config(source.model) | {"torch_dtype": dtype})
        tokenizer = partial / "tokenizer"
        source.copy_tokenizer(tokenizer)
        if tokenizer.is_dir():  # next to config.json, as Hugging Face has the files
            for file in list(tokenizer.iterdir()):
                file.rename(partial / file.name)
            tokenizer.rmdir()
        require_equal(DcpFolder(partial), source, DTYPES[dtype], partial)
        sync_path(partial)
        replace_folder(partial, output, {})
    return moments


def _theirs(parameter: Parameter, values: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    """A parameter or a moment by their names. Weights of some norms are stored as another number,
    which moments are not."""
    parts = parameter.to_hf(values)
    if kind == "weight":
        yield from parts.items()
        return
    zeros = parameter.to_hf(torch.zeros_like(values))
    ones = parameter.to_hf(torch.ones_like(values))
    for name, part in parts.items():
        if not bool((ones[name] - zeros[name] == 1).all()):
            raise ValueError(f"{name} is another multiple of {parameter.ours}: give --no-optim")
        yield name, part - zeros[name]
