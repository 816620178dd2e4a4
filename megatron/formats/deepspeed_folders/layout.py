"""Where DeepSpeed's checkpoints are: folders and trackers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import standing_in

UNIVERSAL_TRACKER = "latest_universal"
UNIVERSAL_SUFFIX = "_universal"

_MODEL_STATES = re.compile(r"(?:(?:(?:bf|fp)16_)?zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_NUMBER = re.compile(r"\d+")


def is_universal(folder: Path) -> bool:
    """Whether this is a universal checkpoint."""
    return (folder / "zero").is_dir()


def is_engine_folder(folder: Path) -> bool:
    """Whether this is a checkpoint that one of DeepSpeed's engines saved."""
    if not folder.is_dir() or is_universal(folder):
        return False
    return any(_MODEL_STATES.fullmatch(name) for name in os.listdir(folder))


def locate(
    path: Path, wanted: str | None, tracker: str, fits: Callable[[Path], bool], suffix: str = ""
) -> Path | None:
    """Where a checkpoint is; see :meth:`megatron.checkpoint.source.Source.locate`.

    Where a save was killed while it replaced one, that is the old one's hidden folder.

    Args:
        path: one checkpoint, or a folder of several.
        wanted: a tag or an iteration; None for the newest.
        tracker: name of the file that names the newest.
        fits: whether a folder is a checkpoint of the format.
        suffix: what follows ``global_step<N>`` in a tag.

    Raises:
        CheckpointError: there are some, but not the wanted one.
    """
    if folder := _standing(path, fits):
        tag = path.name
        if wanted not in (None, tag, tag.removeprefix("global_step").removesuffix(suffix)):
            raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
        return folder
    if not path.is_dir():
        return None
    known = {
        name: folder
        for child in path.iterdir()
        if (name := _tag(child.name)) and (folder := _standing(path / name, fits))
    }
    if not known:
        return None
    listed = ", ".join(sorted(known, key=_newest_last))
    if wanted is not None:
        for name in (wanted, f"global_step{wanted}{suffix}"):
            if name in known:
                return known[name]
        raise CheckpointError(f"{path} has no checkpoint {wanted}; it has {listed}")
    file = path / tracker
    if not file.is_file():
        return known[max(known, key=_newest_last)]
    named = file.read_text(errors="replace").strip()
    if named not in known:
        raise CheckpointError(f"{file} names {named!r}, which is not in {path}; it has {listed}")
    return known[named]


def _standing(final: Path, fits: Callable[[Path], bool]) -> Path | None:
    """Where the checkpoint of a name is: there, or where a killed save has put it."""
    if fits(final):
        return final
    replaced = standing_in(final)
    return replaced if replaced is not None and fits(replaced) else None


def _tag(name: str) -> str | None:
    """The name for which a folder stands; None for what is being written or deleted."""
    if not name.startswith("."):
        return name
    return name[1:].removesuffix(".replaced") if name.endswith(".replaced") else None


def _newest_last(name: str) -> tuple[list[int], str]:
    return [int(number) for number in _NUMBER.findall(name)], name
