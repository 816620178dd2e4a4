"""Checkpoint folders: names, trackers, what is complete, how one appears.

::

    <save>/latest                             tag of the newest checkpoint, replaced last
    <save>/latest_checkpointed_iteration.txt  its iteration, as Megatron writes it
    <save>/global_step<N>/                    appears by a rename, when it is complete
        manifest.json                         size and SHA-256 of every file, and of itself
        index.json                            which part of which parameter each file holds
        config.json, deepspeed.json           the resolved configuration
        state.json                            counters, loss scaler, layout
        weights-<rank>.safetensors            float32 weights
        optimizer-<rank>.safetensors          moments
        random-<rank>.safetensors             random state
        tokenizer/                            the tokenizer's files, in Hugging Face's form
    <save>/.global_step<N>.incomplete         being written
    <save>/.global_step<N>.replaced           the old one, until another has taken its place
    <save>/.global_step<N>.deleted            being deleted
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from megatron.checkpoint.files import CheckpointError, Facts, stage_text, sync_folder
from megatron.checkpoint.manifest import MANIFEST, file_facts, manifest, verify, write_manifest

__all__ = [
    "MANIFEST", "MEGATRON_TRACKER", "TRACKER", "complete_tags", "discard", "file_facts", "find",
    "incomplete_folder", "manifest", "publish", "remove_incomplete", "tag", "verify",
]  # fmt: skip

TRACKER = "latest"
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
_TAG = re.compile(r"global_step(\d+)")


def tag(iteration: int) -> str:
    """Name of a checkpoint's folder."""
    return f"global_step{iteration}"


def iteration_of(name: str) -> int | None:
    """The inverse of :func:`tag`; None for other names."""
    match = _TAG.fullmatch(name)
    return None if match is None else int(match[1])


def incomplete_folder(save: Path, iteration: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return save / f".{tag(iteration)}.incomplete"


def _replaced_folder(save: Path, name: str) -> Path:
    return save / f".{name}.replaced"


def remove_incomplete(save: Path) -> None:
    """Removes what killed saves and deletions left behind; only for the run that saves there."""
    for pattern in (".global_step*.incomplete", ".global_step*.deleted"):
        for folder in save.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in save.glob(".global_step*.replaced"):
        # Killed between two renames, a save leaves the only checkpoint of that name here.
        if (save / folder.name[1:].removesuffix(".replaced")).exists():
            discard(folder)
    for tracker in (TRACKER, MEGATRON_TRACKER):
        for file in save.glob(f".{tracker}.*.tmp"):
            file.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Deletes a checkpoint; half of one is never seen under its name.

    Raises:
        OSError: it cannot be renamed, and is still there as it was.
    """
    name = folder.name.removeprefix(".").removesuffix(".replaced")
    deleted = folder.with_name(f".{name}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    os.rename(folder, deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def publish(save: Path, iteration: int, facts: dict[str, Facts]) -> Path:
    """Turns a fully written incomplete folder into the newest checkpoint.

    At every moment a complete checkpoint is found under the tag that the tracker has, whenever the
    process is killed.

    Args:
        save: folder of the checkpoints.
        iteration: the checkpoint's iteration.
        facts: manifest entry of every file in the folder.

    Raises:
        OSError: a file cannot be written; the checkpoints are as they were.
    """
    name = tag(iteration)
    written, final, replaced = incomplete_folder(save, iteration), save / name, None
    write_manifest(written, facts)
    trackers: dict[Path, Path] = {}
    try:
        for path, text in ((save / MEGATRON_TRACKER, f"{iteration}"), (save / TRACKER, name)):
            trackers[path] = stage_text(path, f"{text}\n")
        sync_folder(written)
        replaced = _make_room(final)
        try:
            os.rename(written, final)
        except OSError:
            if replaced is not None:
                os.rename(replaced, final)
            raise
        sync_folder(save)
        for path, staged in trackers.items():
            os.replace(staged, path)
        sync_folder(save)
    except OSError:
        for staged in trackers.values():
            staged.unlink(missing_ok=True)
        raise
    if replaced is not None:
        # The save has succeeded, whatever keeps the old folder from going.
        with contextlib.suppress(OSError):
            discard(replaced)
    return final


def _make_room(final: Path) -> Path | None:
    """Renames what has a new checkpoint's name already; returns where it is now."""
    replaced = _replaced_folder(final.parent, final.name)
    if not final.exists():
        return replaced if replaced.exists() else None
    if replaced.exists():
        discard(replaced)
    os.rename(final, replaced)
    return replaced


def _complete(save: Path, name: str) -> Path | None:
    """Where the checkpoint of a tag is, if it is complete."""
    for folder in (save / name, _replaced_folder(save, name)):
        if (folder / MANIFEST).is_file():
            return folder
    return None


def complete_tags(save: Path) -> list[str]:
    """Tags of all complete checkpoints in a folder, oldest first."""
    found: dict[int, str] = {}
    for path in save.iterdir():
        name = path.name.removesuffix(".replaced").removeprefix(".")
        iteration = iteration_of(name)
        if iteration is not None and _complete(save, name):
            found[iteration] = name
    return [found[iteration] for iteration in sorted(found)]


def find(load: str, wanted: str | None = None) -> Path | None:
    """The checkpoint to load.

    Args:
        load: a folder of checkpoints, or one checkpoint.
        wanted: a tag (``global_step100``) or an iteration; None for the one that the tracker names
            (without a tracker: the newest complete one).

    Returns:
        The checkpoint's folder; None when the folder has no checkpoint at all, or its tracker names
        one of another format.

    Raises:
        CheckpointError: the wanted checkpoint is not there or not complete, the tracker is empty or
            names none, or the folder's checkpoints are in another format.
    """
    root = Path(load)
    if (root / MANIFEST).is_file():
        if wanted not in (None, root.name, root.name.removeprefix("global_step")):
            raise CheckpointError(f"{root} is one checkpoint, and not {wanted}")
        return root
    if not root.is_dir() and wanted is None:
        return None
    known = complete_tags(root) if root.is_dir() else []
    if wanted is not None:
        name = tag(int(wanted)) if wanted.isdigit() else wanted
        if name not in known:
            raise CheckpointError(
                f"{root} has no complete checkpoint {name}; it has {', '.join(known) or 'none'}"
            )
        return _complete(root, name)
    tracker = root / TRACKER
    if tracker.is_file():
        named = tracker.read_text(errors="replace").strip(" \t\r\n")
        if named not in known:
            if named and (root / named).is_dir() and not (root / named / "index.json").is_file():
                return None  # of another format
            raise CheckpointError(
                f"{tracker} names {named!r}, which is not a complete checkpoint in {root}; it has "
                f"{', '.join(known) or 'none'}: write the tag of one into it, or delete it to load "
                "the newest"
            )
        return _complete(root, named)
    if not known:
        if (root / MEGATRON_TRACKER).is_file():
            raise CheckpointError(
                f"{root / MEGATRON_TRACKER} names a checkpoint, but {root} has none in this "
                "project's format"
            )
        return None
    return _complete(root, known[-1])
