"""Which checkpoints a run keeps."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.folder import discard, iteration_of, tag
from megatron.checkpoint.manifest import MANIFEST

_TWIN = "_universal"
"""What ``--save-universal`` puts behind a checkpoint's name."""


def superseded(
    save: Path, newest: int, keep_last: int | None, keep_every: int | None
) -> list[Path]:
    """Checkpoints that ``--keep-last`` and ``--keep-every`` give up, oldest first.

    Those of iterations past ``newest`` belong to a run that was gone back on; they neither count
    nor go. Folders that are not complete checkpoints of this project are nobody's to delete.

    Args:
        save: folder of checkpoints.
        newest: iteration of the checkpoint that was just committed.
        keep_last: how many of the newest stay; None for all.
        keep_every: those of its multiples stay besides; None for no others.

    Returns:
        Their folders, each behind its universal twin.
    """
    if keep_last is None:
        return []
    assert keep_last > 0, "the one just saved stays"
    known = []
    for path in save.iterdir():
        iteration = iteration_of(path.name)
        if iteration is not None and iteration <= newest and _is_ours(path):
            known.append(iteration)
    given_up = [
        iteration
        for iteration in sorted(known)[:-keep_last]
        if keep_every is None or iteration % keep_every
    ]
    folders = []
    for iteration in given_up:
        twin = save / f"{tag(iteration)}{_TWIN}"
        folders += [twin] if twin.is_dir() else []
        folders.append(save / tag(iteration))
    return folders


def _is_ours(folder: Path) -> bool:
    """Whether a save of this project made it, in its own format or, with its configuration beside
    DeepSpeed's files, in that one's."""
    if (folder / MANIFEST).is_file():
        return True
    return (folder / "config.json").is_file() and (folder / "state.json").is_file()


def apply_retention(
    save: Path, newest: int, keep_last: int | None, keep_every: int | None
) -> list[str]:
    """Deletes what is superseded; see :func:`superseded`.

    Returns:
        A line about each checkpoint that could not be deleted; the others are gone all the same.
    """
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
