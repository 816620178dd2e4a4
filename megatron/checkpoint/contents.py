"""Checks what the JSON files of a checkpoint say: the pieces of every parameter are all of it, and
none twice; counters are numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.index import Piece

INDEX, STATE = "index.json", "state.json"
_COUNTERS = ("iteration", "consumed_samples", "optimizer_step")


def check_index(folder: Path, files: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Reads a checkpoint's index and checks it.

    Args:
        folder: the checkpoint.
        files: what its manifest lists.

    Returns:
        The pieces of each parameter by canonical name.

    Raises:
        CheckpointError: pieces overlap, leave a gap, disagree about shape or kinds, or lie in files
            that the manifest does not list.
    """
    path = folder / INDEX
    try:
        index = {
            name: [Piece.from_json(piece) for piece in pieces]
            for name, pieces in read_json(path).items()
        }
        for name, pieces in index.items():
            _check_parameter(path, name, pieces, files)
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is not an index: {error!r}") from None
    if not index:
        raise CheckpointError(f"{path} lists no parameter")
    return index


def check_state(folder: Path) -> None:
    """Reads a checkpoint's counters and checks them.

    Raises:
        CheckpointError: one is no number, or that of a training run (which says its world size)
            lacks one.
    """
    path = folder / STATE
    state = read_json(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    for name in _COUNTERS:
        value = state.get(name)
        if (name in state or "world_size" in state) and (type(value) is not int or value < 0):
            raise CheckpointError(f"{path}: {name} is {value!r}, which is no count")


def _check_parameter(path: Path, name: str, pieces: list[Piece], files: Mapping[str, Any]) -> None:
    if not pieces:
        raise CheckpointError(f"{path} has no piece of {name}")
    shape, kinds = pieces[0].shape, pieces[0].files.keys()
    for piece in pieces:
        if piece.shape != shape or piece.files.keys() != kinds or "weight" not in kinds:
            raise CheckpointError(f"{path}: the pieces of {name} differ in shape or kinds")
        for file in piece.files.values():
            if file not in files:
                raise CheckpointError(
                    f"{path}: {name} lies in {file}, which the manifest does not list"
                )
    if not tiles(shape, pieces):
        raise CheckpointError(
            f"{path}: the pieces of {name} overlap or leave a gap in its {math.prod(shape)} "
            "elements"
        )


def tiles(shape: tuple[int, ...], pieces: Iterable[Piece]) -> bool:
    """Whether pieces are all of a parameter of that shape, and no element twice.

    The runs of data-parallel ranks must follow one another in each share. Along each dimension that
    is cut the shares' ranges must fill it, and there must be a share for each product of them.
    """
    shares: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        shares.setdefault(piece.cuts, []).append(piece)
    cut = {tuple(dim for dim, _ in cuts) for cuts in shares}
    if len(cut) != 1:
        return False
    (dims,) = cut
    if not all(0 <= dim < len(shape) for dim in dims):
        return False
    for members in shares.values():
        runs = [(piece.start, piece.end - piece.start) for piece in members]
        if not _fill(runs, math.prod(members[0].share_shape)):
            return False
    different = [{ranges for _, ranges in along} for along in zip(*shares, strict=True)]
    return len(shares) == math.prod(map(len, different)) and all(
        _fill([run for ranges in along for run in ranges], shape[dim])
        for dim, along in zip(dims, different, strict=True)
    )


def _fill(runs: list[tuple[int, int]], total: int) -> bool:
    """Whether runs (start, length) follow one another from 0 to ``total``."""
    place = 0
    for start, length in sorted(runs):
        if start != place or length <= 0:
            return False
        place += length
    return place == total
