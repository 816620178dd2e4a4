"""Deletion of checkpoints by ``--keep-last`` and ``--keep-every``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megatron.checkpoint.folder import BEST, KEPT, UNIVERSAL, discard, iteration_of, tag
from megatron.checkpoint.manifest import MANIFEST
from megatron.util.json_text import parse_json


def superseded(
    save: Path, newest: int, keep_last: int | None, keep_every: int | None
) -> list[Path]:
    """Return the folders to delete according to ``--keep-last`` and ``--keep-every``, oldest first,
    each after its universal copy.

    Checkpoints after iteration ``newest``, which was just saved, belong to an abandoned run. They
    are neither counted nor deleted. Folders that this project did not save are never deleted, nor
    are those that the files :data:`BEST` and :data:`KEPT` name.
    """
    if keep_last is None:
        return []
    assert keep_last > 0, "the newest is kept"
    known = []
    for path in save.iterdir():
        iteration = iteration_of(path.name)
        if iteration is not None and iteration <= newest and _is_ours(path):
            known.append(iteration)
    kept = {_best(save), *_kept(save)}
    given_up = [
        iteration
        for iteration in sorted(known)[:-keep_last]
        if tag(iteration) not in kept and (keep_every is None or iteration % keep_every)
    ]
    folders = []
    for iteration in given_up:
        twin = save / f"{tag(iteration)}{UNIVERSAL}"
        folders += [twin] if twin.is_dir() else []
        folders.append(save / tag(iteration))
    return folders


def _best(save: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return str(parse_json((save / BEST).read_bytes(), BEST, lenient=True)["checkpoint"])
    return None


def _kept(save: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        kept = parse_json((save / KEPT).read_bytes(), KEPT, lenient=True)["kept"]
        return [str(each["checkpoint"]) for each in kept]
    return []


def _is_ours(folder: Path) -> bool:
    """Return whether this project saved a checkpoint, in its own format, or in DeepSpeed's format
    with this project's configuration."""
    if (folder / MANIFEST).is_file():
        return True
    return (folder / "config.json").is_file() and (folder / "state.json").is_file()


def apply_retention(
    save: Path, newest: int, keep_last: int | None, keep_every: int | None
) -> list[str]:
    """Delete the folders of :func:`superseded`. Return a line about each that cannot be deleted."""
    notes = []
    try:
        folders = superseded(save, newest, keep_last, keep_every)
    except OSError as error:
        return [f"{save} cannot be listed, nothing is deleted: {error.strerror}"]
    for folder in folders:
        try:
            discard(folder)
        except OSError as error:
            notes.append(f"{folder} cannot be deleted: {error.strerror}")
    return notes
