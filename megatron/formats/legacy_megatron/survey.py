"""Where each parameter of an old Megatron checkpoint is, from a look into all its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.formats.legacy_megatron.names import HEAD_COPY, rename
from megatron.formats.legacy_megatron.optimizer import Key
from megatron.formats.legacy_megatron.rank_file import RankFile

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """Where a parameter is.

    Attributes:
        pipeline: pipeline rank.
        key: chunk and Megatron's name.
        shape: of a tensor-parallel rank's share.
        dtype: in which it is stored.
    """

    pipeline: int
    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Stage:
    """What all tensor ranks of a pipeline rank hold.

    Attributes:
        first: the first one's file.
        chunks: shape and format of each parameter, by Megatron's name.
    """

    first: RankFile
    chunks: Sequence[Mapping[str, tuple[tuple[int, ...], torch.dtype]]]


def survey(
    stage: Callable[[int], Sequence[RankFile]], pipeline_size: int
) -> tuple[dict[str, Place], int]:
    """Finds every parameter.

    Args:
        stage: gives the files of a pipeline rank, by tensor rank.
        pipeline_size: number of pipeline ranks.

    Returns:
        Places by canonical name, and the number of blocks.

    Raises:
        CheckpointError: files are not of one checkpoint, blocks are missing, or a parameter is not
            known; the message names the file.
    """
    stages = []
    for pipeline in range(pipeline_size):
        stages.append(_look(stage(pipeline)))
        _check_together(stages[0], stages[-1])
    places: dict[str, Place] = {}
    layer = 0
    # Stages are in order of chunks: rank 0's first, rank 1's first, ..., rank 0's second, ...
    for chunk in range(len(stages[0].chunks)):
        for pipeline, looked in enumerate(stages):
            path, layers = looked.first.path, set()
            for theirs, (shape, dtype) in looked.chunks[chunk].items():
                numbered = _LAYER.search(theirs)
                layers |= {int(numbered[1])} if numbered else set()
                if theirs == HEAD_COPY:
                    continue
                ours = rename(theirs, layer)
                if ours is None:
                    raise CheckpointError(f"{path}: {_unknown(theirs)}")
                if ours in places:
                    raise CheckpointError(f"{path}: {theirs} is there twice, as {ours}")
                places[ours] = Place(pipeline, (chunk, theirs), shape, dtype)
            if layers != set(range(len(layers))):
                raise CheckpointError(f"{path} has blocks {sorted(layers)}, some are missing")
            layer += len(layers)
    return places, layer


def _look(files: Sequence[RankFile]) -> _Stage:
    """What the files of a pipeline rank have in common, which is all but the values."""
    stages = [
        _Stage(
            file,
            [
                {name: (tuple(values.shape), values.dtype) for name, values in chunk.items()}
                for chunk in file.chunks
            ],
        )
        for file in files
    ]
    for stage in stages:
        _check_together(stages[0], stage)
        if stage.chunks != stages[0].chunks:
            raise CheckpointError(
                f"{stage.first.path} has other parameters than {files[0].path}: "
                f"{_first_difference(stages[0].chunks, stage.chunks)}"
            )
    return stages[0]


def _check_together(here: _Stage, there: _Stage) -> None:
    """Refuses files of different checkpoints."""
    for what in ("version", "iteration"):
        wanted, found = getattr(here.first, what), getattr(there.first, what)
        if wanted != found:
            raise CheckpointError(
                f"{there.first.path} is of {what} {found}, {here.first.path} of {wanted}: they are "
                "not of one checkpoint"
            )
    if len(here.chunks) != len(there.chunks):
        raise CheckpointError(
            f"{there.first.path} has {len(there.chunks)} model chunks, {here.first.path} has "
            f"{len(here.chunks)}"
        )


def _unknown(theirs: str) -> str:
    """What is said of a parameter without a place here."""
    hint = ""
    if re.match(r"(decoder|embedding|output_layer)\.", theirs):
        hint = " (it is of Megatron's core library, whose checkpoints are of another form)"
    elif theirs.startswith("language_model.decoder."):
        hint = " (the model is an encoder and a decoder)"
    return f"{theirs} is no parameter that is known here{hint}"


def _first_difference(
    wanted: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> str:
    for here, there in zip(wanted, found, strict=True):
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                return f"{name} is {there.get(name, 'missing')}, not {here.get(name, 'there')}"
    raise AssertionError("equal")
