"""Where DeepSpeed's checkpoints are: folders, trackers, and how one becomes visible."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.files import CheckpointError, sync_folder, write_text
from megatron.checkpoint.folder import TRACKER

UNIVERSAL_TRACKER = "latest_universal"
UNIVERSAL_SUFFIX = "_universal"
CONFIG, STATE = "config.json", "state.json"
"""This project's own files beside DeepSpeed's: the run's configuration and its counters."""

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

    Args:
        path: one checkpoint, or a folder of several.
        wanted: a tag or an iteration; None for the newest.
        tracker: name of the file that names the newest.
        fits: whether a folder is a checkpoint of the format.
        suffix: what follows ``global_step<N>`` in a tag.

    Raises:
        CheckpointError: there are some, but not the wanted one.
    """
    if fits(path):
        tag = path.name
        if wanted not in (None, tag, tag.removeprefix("global_step").removesuffix(suffix)):
            raise CheckpointError(f"{path} is one checkpoint, and not {wanted}")
        return path
    if not path.is_dir():
        return None
    known = {child.name: child for child in path.iterdir() if child.name[0] != "." and fits(child)}
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


def _newest_last(name: str) -> tuple[list[int], str]:
    return [int(number) for number in _NUMBER.findall(name)], name


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is written until it is complete.

    A killed save leaves it behind; :func:`megatron.checkpoint.folder.remove_incomplete` and the
    next save of the same checkpoint remove it.
    """
    return folder.with_name(f".{folder.name}.incomplete")


def publish(written: Path, final: Path, tracker: str | None = TRACKER) -> None:
    """Gives a fully written folder its name, and names it in the tracker.

    Args:
        written: the folder; its files are on the disk.
        final: its name from now on; what had that name before is removed.
        tracker: file beside it that names the newest checkpoint; None leaves it alone.
    """
    sync_folder(written)
    replaced = None
    if final.exists():
        replaced = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(written, final)
    sync_folder(final.parent)
    if tracker is not None:
        write_text(final.parent / tracker, f"{final.name}\n")
    if replaced is not None:
        # The save has succeeded, whatever keeps the old folder from going.
        shutil.rmtree(replaced, ignore_errors=True)
