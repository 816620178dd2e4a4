"""Checkpoint folders: names, trackers, what is complete, how one appears.

::

    <save>/latest                             tag of the newest checkpoint, replaced last
    <save>/latest_checkpointed_iteration.txt  its iteration, as Megatron writes it
    <save>/global_step<N>/                    appears by a rename, when it is complete
        manifest.json                         size and SHA-256 of every file, and of itself
        index.json                            which slice of which parameter each file holds
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
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.checkpoint.files import CheckpointError, Facts, stage_text
from megatron.checkpoint.index import INDEX
from megatron.checkpoint.manifest import MANIFEST, write_manifest
from megatron.util.files import sync_path

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


def _replaced_folder(final: Path) -> Path:
    return final.parent / f".{final.name}.replaced"


def standing_in(final: Path) -> Path | None:
    """The old checkpoint of a name, where a killed save left none under the name itself.

    Args:
        final: the name; nothing is there, an empty folder, or this format's without a manifest.

    Returns:
        None when there is no old one, or another has taken its place.
    """
    replaced = _replaced_folder(final)
    if not replaced.is_dir():
        return None
    if final.is_dir() and any(final.iterdir()):
        half = (final / INDEX).is_file() and not (final / MANIFEST).is_file()
        return replaced if half else None
    return replaced


def remove_incomplete(save: Path) -> None:
    """Removes what killed saves and deletions left behind; only for the run that saves there."""
    for pattern in (".global_step*.incomplete", ".global_step*.deleted"):
        for folder in save.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in save.glob(".global_step*.replaced"):
        # Killed between two renames, a save leaves the only checkpoint of that name here.
        if standing_in(save / folder.name[1:].removesuffix(".replaced")) is None:
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
    written, name = incomplete_folder(save, iteration), tag(iteration)
    write_manifest(written, facts)
    replace_folder(written, save / name, {MEGATRON_TRACKER: f"{iteration}", TRACKER: name})
    return save / name


@contextlib.contextmanager
def unfinished_folder(final: Path) -> Iterator[Path]:
    """An empty folder beside ``final`` to write in; it is gone when the block fails.

    A killed process leaves it behind; :func:`remove_incomplete` and the next one to write there
    remove it. The block ends with :func:`publish` or :func:`replace_folder`.

    Raises:
        OSError: it cannot be made.
    """
    folder = final.with_name(f".{final.name}.incomplete")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    except BaseException:  # an interrupt too must not leave half a model
        shutil.rmtree(folder, ignore_errors=True)
        raise


def replace_folder(written: Path, final: Path, trackers: Mapping[str, str]) -> None:
    """Gives a fully written folder of any format its name; what had the name before goes.

    At every moment the old or the new folder is under the name or :func:`standing_in` for it.

    Args:
        written: the folder, beside ``final``; its files are on the disk.
        final: its name from now on.
        trackers: text of files beside it, by name, that are replaced once it is there.

    Raises:
        OSError: something cannot be renamed or written; what had the name has it again, unless
            it was only a tracker that could not be replaced.
    """
    save, replaced = final.parent, None
    staged: dict[Path, Path] = {}
    try:
        for name, text in trackers.items():
            staged[save / name] = stage_text(save / name, text)
        sync_path(written)
        replaced = _make_room(final)
        try:
            os.rename(written, final)
        except OSError:
            if replaced is not None:
                os.rename(replaced, final)
            raise
        sync_path(save)
        for path, text_file in staged.items():
            os.replace(text_file, path)
        sync_path(save)
    except OSError:
        for text_file in staged.values():
            text_file.unlink(missing_ok=True)
        raise
    if replaced is not None:
        # The save has succeeded, whatever keeps the old folder from going.
        with contextlib.suppress(OSError):
            discard(replaced)


def _make_room(final: Path) -> Path | None:
    """Renames what has a new checkpoint's name already; returns where it is now."""
    only_copy = standing_in(final)
    if only_copy is not None:
        if final.exists():
            discard(final)
        return only_copy
    if not final.exists():
        return None
    replaced = _replaced_folder(final)
    if replaced.exists():
        discard(replaced)
    os.rename(final, replaced)
    return replaced


def _complete(save: Path, name: str) -> Path | None:
    """Where the checkpoint of a tag is, if it is complete."""
    for folder in (save / name, standing_in(save / name)):
        if folder is not None and (folder / MANIFEST).is_file():
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
            if named and (root / named).is_dir() and not (root / named / INDEX).is_file():
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
