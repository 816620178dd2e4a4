"""Checkpoint folders: names, trackers, completeness, publishing, locking, retention.

::

    <save>/latest                             tag of the newest checkpoint, replaced last
    <save>/latest_checkpointed_iteration.txt  its iteration, in Megatron's format
    <save>/best_epoch.json                    tag of the best checkpoint of a fine-tuning
    <save>/kept.json                          tags of checkpoints before a loss spike
    <save>/global_step<N>/                    renamed to this name once it is complete
        manifest.json                         size and SHA-256 of every file, and of itself
        index.json                            files that contain each slice of each parameter
        config.json, deepspeed.json           the resolved configuration
        base.json                             for adapters: the model that they belong to
        state.json                            counters, loss scaler, layout
        weights-<rank>.safetensors            float32 weights
        optimizer-<rank>.safetensors          moments
        random-<rank>.safetensors             random state
        float8-<rank>.safetensors             amax history of --fp8-recipe delayed
        tokenizer/                            the tokenizer's files, in Hugging Face's format
    <save>/.global_step<N>.incomplete         being written
    <save>/.global_step<N>.replaced           the previous one, until the new one has its name
    <save>/.global_step<N>.deleted            being deleted
    <save>/.global_step<N>.damaged            set aside by --on-damaged-checkpoint previous
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.checkpoint.files import CheckpointError, Facts, stage_text
from megatron.checkpoint.manifest import INDEX, MANIFEST, STATE, write_manifest
from megatron.util.files import Lock, LockTakenError, sync_path

TRACKER = "latest"
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".lock"
BEST = "best_epoch.json"
"""JSON file whose key ``checkpoint`` is the tag of a checkpoint that is never deleted."""
KEPT = "kept.json"
"""JSON file with a list ``kept``, whose entries' ``checkpoint`` is a tag that is never deleted."""
_TAG = re.compile(r"global_step(\d+)")
UNIVERSAL = "_universal"
"""Suffix that ``--save-universal`` appends to a checkpoint's folder name."""
_WAIT_SECONDS = 120.0
"""Seconds to wait for a lock that another host holds. A file server takes up to 90 s (the NFS 4
lease) to notice that a host is gone."""


def tag(iteration: int) -> str:
    """Return the tag of an iteration, which is the name of its checkpoint's folder."""
    return f"global_step{iteration}"


def iteration_of(name: str) -> int | None:
    """Return the iteration of a :func:`tag`, or None for any other name."""
    match = _TAG.fullmatch(name)
    return None if match is None else int(match[1])


def step_of(name: str) -> int | None:
    """Return the iteration of a checkpoint's or universal copy's name, or None for other names."""
    return iteration_of(name.removesuffix(UNIVERSAL))


def incomplete_folder(save: Path, iteration: int) -> Path:
    """Return the path of a checkpoint's folder while it is being written."""
    return save / f".{tag(iteration)}.incomplete"


def _replaced_folder(final: Path) -> Path:
    return final.parent / f".{final.name}.replaced"


def standing_in(final: Path) -> Path | None:
    """Return the old checkpoint that a killed save had renamed, if it must be used for ``final``:
    that folder is missing, empty, or has no manifest. Otherwise return None."""
    replaced = _replaced_folder(final)
    if not replaced.is_dir():
        return None
    if final.is_dir() and any(final.iterdir()):
        half = (final / INDEX).is_file() and not (final / MANIFEST).is_file()
        return replaced if half else None
    return replaced


def remove_incomplete(save: Path) -> None:
    """Remove what killed saves and deletions left. Only the run that saves there may call this."""
    for pattern in (".global_step*.incomplete", ".global_step*.deleted"):
        for folder in save.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in save.glob(".global_step*.replaced"):
        # If a save was killed between its two renames, this is the only checkpoint of that name.
        if standing_in(save / folder.name[1:].removesuffix(".replaced")) is None:
            discard(folder)
    for tracker in (TRACKER, MEGATRON_TRACKER):
        for file in save.glob(f".{tracker}.*.tmp"):
            file.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete a checkpoint. Rename it first, so that a partly deleted folder never has its name.
    Raises OSError if the rename fails; the checkpoint is then unchanged."""
    name = folder.name.removeprefix(".").removesuffix(".replaced")
    deleted = folder.with_name(f".{name}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    os.rename(folder, deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def publish(save: Path, iteration: int, facts: dict[str, Facts]) -> Path:
    """Turn a fully written incomplete folder into the newest checkpoint. ``facts`` are its files'
    manifest entries. Even if the process is killed, the tracker refers to a complete checkpoint.
    Raises OSError if a file cannot be written; the old checkpoints are then unchanged."""
    written, name = incomplete_folder(save, iteration), tag(iteration)
    write_manifest(written, facts)
    replace_folder(written, save / name, {MEGATRON_TRACKER: f"{iteration}", TRACKER: name})
    return save / name


def replace_folder(written: Path, final: Path, trackers: Mapping[str, str]) -> None:
    """Rename a fully written folder of any format to ``final``. Then write ``trackers``, the
    contents of files next to it by file name, and delete the folder that had the name before.

    At every moment, either the old or the new folder has the name, or :func:`standing_in` finds the
    old one. Raises OSError if a rename or write fails. The old folder then has its name back,
    unless only a tracker could not be replaced.
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
        # The save has succeeded even if the old folder cannot be deleted.
        with contextlib.suppress(OSError):
            discard(replaced)


def _make_room(final: Path) -> Path | None:
    """Rename the folder, if any, that has a new checkpoint's name. Return its new path."""
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
    for folder in (save / name, standing_in(save / name)):
        if folder is not None and (folder / MANIFEST).is_file():
            return folder
    return None


def complete_tags(save: Path) -> list[str]:
    """Return the tags of all complete checkpoints in ``save``, oldest first."""
    tags: dict[int, str] = {}
    for path in save.iterdir():
        name = path.name.removesuffix(".replaced").removeprefix(".")
        iteration = iteration_of(name)
        if iteration is not None and _complete(save, name):
            tags[iteration] = name
    return [tags[iteration] for iteration in sorted(tags)]


def lost_manifest(folder: Path) -> str | None:
    """Return why a folder with a checkpoint's other files is incomplete, or None otherwise."""
    if (folder / MANIFEST).is_file() or not all((folder / n).is_file() for n in (INDEX, STATE)):
        return None
    return (
        f"{folder / MANIFEST} is missing, without which {folder.name} is not a complete checkpoint "
        "(its save was killed, or the file was deleted)"
    )


def may_be_ours(path: Path) -> bool:
    """Return whether a path is a checkpoint in this project's format or a folder of such
    checkpoints, including checkpoints that have lost their manifest."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or bool(complete_tags(path) or lost_manifests(path))


def lost_manifests(path: Path) -> list[str]:
    """Return the :func:`lost_manifest` messages for a folder and its checkpoint subfolders."""
    named = (path / name for name in sorted(os.listdir(path)) if iteration_of(name) is not None)
    return [lost for each in (path, *named) if (lost := lost_manifest(each))]


def find(load: str, wanted: str | None = None) -> Path | None:
    """Return the folder of the checkpoint to load. This is ``load`` itself, or the checkpoint in it
    whose tag (``global_step100``) or iteration is ``wanted``. By default, it is the tracker's, or
    without a tracker the newest complete one. Return None if there is no checkpoint, or if the
    tracker refers to one of another format.

    Raises CheckpointError if the wanted checkpoint is missing or incomplete, if the tracker is
    empty or invalid, or if only Megatron's tracker exists.
    """
    root = Path(load)
    if (root / MANIFEST).is_file():
        if wanted not in (None, root.name, root.name.removeprefix("global_step")):
            raise CheckpointError(f"{root} is one checkpoint, not {wanted}")
        return root
    if not root.is_dir() and wanted is None:
        return None
    if wanted is None and (lost := lost_manifest(root)):
        raise CheckpointError(lost)
    known = complete_tags(root) if root.is_dir() else []
    if wanted is not None:
        name = tag(int(wanted)) if wanted.isdigit() else wanted
        if name not in known:
            lost = lost_manifest(root / name)
            raise CheckpointError(
                f"{root} has no complete checkpoint {name}{f': {lost}' if lost else ''}; it has "
                f"{', '.join(known) or 'none'}"
            )
        return _complete(root, name)
    tracker = root / TRACKER
    if tracker.is_file():
        named = tracker.read_text(errors="replace").strip(" \t\r\n")
        if named not in known:
            is_child = Path(named).name == named and named not in ("", "..")
            if is_child and (root / named).is_dir() and not (root / named / INDEX).is_file():
                return None  # the tracker is of another format
            lost = lost_manifest(root / named) if named else None
            raise CheckpointError(
                f"{tracker} names {named!r}, which is not a complete checkpoint in {root}"
                f"{f': {lost}' if lost else ''}; it has {', '.join(known) or 'none'}: write the "
                "tag of one into it, or delete it to load the newest"
            )
        return _complete(root, named)
    if not known:
        if (root / MEGATRON_TRACKER).is_file():
            raise CheckpointError(
                f"{root / MEGATRON_TRACKER} names a checkpoint, but {root} has none in this "
                "project's format"
            )
        if lost_manifests(root):
            raise CheckpointError(lost_manifests(root)[-1])
        return None
    return _complete(root, known[-1])


def lock_folder(
    save: Path,
    say: Callable[[str], None] = lambda line: None,
    wait_seconds: float = _WAIT_SECONDS,
) -> Lock:
    """Lock a folder of checkpoints for one run, creating it if necessary. Its file ``.lock``
    describes the holder. If the holder is on another host, wait up to ``wait_seconds``. Raises
    CheckpointError if another run saves there, or OSError if the folder cannot be written."""
    save.mkdir(parents=True, exist_ok=True)
    path, told, deadline = save / LOCK, False, time.monotonic() + wait_seconds
    while True:
        try:
            lock = Lock(path)
            break
        except LockTakenError:
            holder = path.read_text().strip() or "another process"
        if holder.endswith(f" on {socket.gethostname()}") or time.monotonic() > deadline:
            raise CheckpointError(
                f"--save {save}: {holder} is saving there ({LOCK}); two runs would delete "
                "each other's checkpoints: end that one, or give another --save"
            )
        if not told:
            say(f"--save {save}: waiting for {holder}, or for the file server to notice that "
                "it is gone")  # fmt: skip
            told = True
        time.sleep(1)
    if lock.missing:
        say(f"{path}: this file system has no locks ({lock.missing}), so nothing keeps another "
            "run from saving there")  # fmt: skip
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    return lock
