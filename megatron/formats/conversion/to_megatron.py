"""``to-megatron``: a checkpoint of any format in Megatron-LM's old layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import DTYPES, Source, open_checkpoint
from megatron.config import parse_configs
from megatron.config.flags import option
from megatron.formats.conversion.needs import dtype_of, required
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.legacy_megatron.writer import write_megatron
from megatron.util.progress import say


@dataclass(frozen=True)
class ToMegatronConfig:
    """Conversion to Megatron-LM's old layout."""

    load: str | None = option(None)
    """Folder of checkpoints, or one checkpoint, of any format."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint."""
    output: str | None = option(None)
    """Folder of checkpoints to write in; --load of Megatron."""
    target_tensor_parallel_size: int = option(1)
    """Tensor-parallel size to write for."""
    target_pipeline_parallel_size: int = option(1)
    """Pipeline-parallel size to write for."""
    dtype: str | None = option(None, choices=tuple(DTYPES), derived="as trained")
    """Number format of the weights."""
    release: bool = option(False)
    """Write release instead of iter_<iteration>: weights to start from, which Megatron loads
    without --no-load-optim and --no-load-rng."""
    checking: bool = option(True, off="--no-checking")
    """Do not read the result back to compare it with the checkpoint."""


def to_megatron(argv: Sequence[str]) -> None:
    """Writes the weights as Megatron-LM's ranks would, and reads them back.

    Raises:
        ConfigError: a flag is missing or wrong.
        ValueError: Megatron has no such network, or the sizes do not divide it.
        CheckpointError: the checkpoint is damaged, or what is read back differs.
    """
    (config,) = parse_configs(
        (ToMegatronConfig,),
        argv,
        prog="convert_checkpoint.py to-megatron",
        description="Writes a checkpoint in the layout of Megatron-LM's version 3.",
    )
    load, output = required(config, "load"), Path(required(config, "output"))
    wanted = None if config.iteration is None else str(config.iteration)
    source = opened(load, wanted)
    sizes = config.target_tensor_parallel_size, config.target_pipeline_parallel_size
    export(source, output, sizes, config.dtype, config.release, config.checking)


def opened(load: str, wanted: str | None = None) -> Source:
    """Opens a checkpoint and prints what it does not say by itself.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    source = open_checkpoint(load, wanted)
    for note in source.notes:
        print(f"{source.folder}: {note}")
    return source


def export(
    source: Source,
    output: Path,
    sizes: tuple[int, int],
    dtype: str | None = None,
    release: bool = False,
    checking: bool = True,
) -> Path:
    """Writes a checkpoint in Megatron's old layout, and prints what was done.

    Args:
        source: what is written.
        output: folder of checkpoints.
        sizes: tensor-parallel and pipeline-parallel size.
        dtype: number format; None for the one it was trained in.
        release: leave the iteration out.
        checking: read the result back before it gets its name.

    Returns:
        The new checkpoint's folder.

    Raises:
        ValueError: Megatron has no such network, or the sizes do not divide it.
        CheckpointError: the checkpoint is damaged, or what is read back differs.
    """
    dtype = dtype or dtype_of(source)
    iteration = source.state.get("iteration")
    if iteration is None and isinstance(source, MegatronCheckpoint):
        iteration = source.iteration  # weights only, of a run that had one
    if release:
        iteration = None

    def check(folder: Path) -> None:
        compare(source, folder, DTYPES[dtype])

    folder = write_megatron(
        source, output, *sizes, iteration, dtype, progress=say,
        check=check if checking else None,
    )  # fmt: skip
    result = "read back and equal, bit by bit" if checking else "not read back"
    print(
        f"{folder}: {source.folder} in {dtype} for tensor-parallel size {sizes[0]} and pipeline-"
        f"parallel size {sizes[1]}; {len(source.names())} parameters, {result}"
    )
    if iteration is not None:
        print("it holds weights only: load it with --no-load-optim --no-load-rng or --finetune")
    return folder


def compare(source: Source, folder: Path, dtype: torch.dtype) -> None:
    """Reads a written checkpoint and compares every parameter.

    Raises:
        CheckpointError: one differs; that is a defect of the export.
    """
    written = MegatronCheckpoint(folder)
    for name in source.names():
        wanted = source.tensor(name).to(dtype).float()
        if not torch.equal(written.tensor(name), wanted):
            raise CheckpointError(f"{folder}: {name} is not what {source.folder} holds")
