"""Checkpoint folders: names, trackers, completeness, publishing, locking, retention.

::

    <save>/latest                             tag of the newest checkpoint, replaced last
    <save>/latest_checkpointed_iteration.txt  its iteration, as Megatron writes it
    <save>/best_epoch.json                    names the best checkpoint of a fine-tuning
    <save>/kept.json                          names checkpoints that a spike followed
    <save>/global_step<N>/                    appears by a rename, when it is complete
        manifest.json                         size and SHA-256 of every file, and of itself
        index.json                            which slice of which parameter is in which file
        config.json, deepspeed.json           the resolved configuration
        base.json                             of adapters: the model that they belong to
        state.json                            counters, loss scaler, layout
        weights-<rank>.safetensors            float32 weights
        optimizer-<rank>.safetensors          moments
        random-<rank>.safetensors             random state
        float8-<rank>.safetensors             largest values of --fp8-recipe delayed
        tokenizer/                            the tokenizer's files, in Hugging Face's form
    <save>/.global_step<N>.incomplete         being written
    <save>/.global_step<N>.replaced           the old one, until another has taken its place
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
"""Under ``checkpoint``, the tag of a checkpoint that is never deleted."""
KEPT = "kept.json"
"""Under ``kept``, a list: the ``checkpoint`` of each is a tag, and is not deleted."""
_TAG = re.compile(r"global_step(\d+)")
UNIVERSAL = "_universal"
"""Ending that ``--save-universal`` appends to a checkpoint's name."""
_WAIT_SECONDS = 120.0
"""Seconds to wait for a lock of another host: a file server takes up to 90 s (the lease of NFS 4)
to notice that its holder is gone."""


def tag(iteration: int) -> str:
    """Name of a checkpoint's folder."""
    return f"global_step{iteration}"


def iteration_of(name: str) -> int | None:
    """The inverse of :func:`tag`; None for other names."""
    match = _TAG.fullmatch(name)
    return None if match is None else int(match[1])


def step_of(name: str) -> int | None:
    """The iteration of a checkpoint, or of its universal copy; None for other names."""
    return iteration_of(name.removesuffix(UNIVERSAL))


def incomplete_folder(save: Path, iteration: int) -> Path:
    """Path of a checkpoint that is being written."""
    return save / f".{tag(iteration)}.incomplete"


def _replaced_folder(final: Path) -> Path:
    return final.parent / f".{final.name}.replaced"


def standing_in(final: Path) -> Path | None:
    """The renamed old checkpoint, if a killed save left nothing, an empty folder or one without a
    manifest at ``final``."""
    replaced = _replaced_folder(final)
    if not replaced.is_dir():
        return None
    if final.is_dir() and any(final.iterdir()):
        half = (final / INDEX).is_file() and not (final / MANIFEST).is_file()
        return replaced if half else None
    return replaced


def remove_incomplete(save: Path) -> None:
    """Removes leftovers of killed saves and deletions; only for the run that saves there."""
    for pattern in (".global_step*.incomplete", ".global_step*.deleted"):
        for folder in save.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in save.glob(".global_step*.replaced"):
        # A save that was killed between two renames leaves the only checkpoint of that name here.
        if standing_in(save / folder.name[1:].removesuffix(".replaced")) is None:
            discard(folder)
    for tracker in (TRACKER, MEGATRON_TRACKER):
        for file in save.glob(f".{tracker}.*.tmp"):
            file.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Deletes a checkpoint; a partly deleted one never has its name. Raises OSError if it cannot be
    renamed, and is unchanged."""
    name = folder.name.removeprefix(".").removesuffix(".replaced")
    deleted = folder.with_name(f".{name}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    os.rename(folder, deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def publish(save: Path, iteration: int, facts: dict[str, Facts]) -> Path:
    """Turns a fully written incomplete folder into the newest checkpoint; ``facts`` are the
    manifest entries of its files. Whenever the process is killed, the tracker names a complete
    checkpoint. Raises OSError if a file cannot be written; the checkpoints are unchanged."""
    written, name = incomplete_folder(save, iteration), tag(iteration)
    write_manifest(written, facts)
    replace_folder(written, save / name, {MEGATRON_TRACKER: f"{iteration}", TRACKER: name})
    return save / name


def replace_folder(written: Path, final: Path, trackers: Mapping[str, str]) -> None:
    """Renames a fully written folder of any format to ``final`` and deletes what had that name;
    then replaces ``trackers``, text of files next to it by name.

    At every moment the old or the new folder has the name or is :func:`standing_in` for it. Raises
    OSError if something cannot be renamed or written; the old folder has its name again, unless
    only a tracker could not be replaced.
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
    """Rename an existing folder that has a new checkpoint's name; return its new path."""
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
    """Tags of all complete checkpoints in a folder, oldest first."""
    tags: dict[int, str] = {}
    for path in save.iterdir():
        name = path.name.removesuffix(".replaced").removeprefix(".")
        iteration = iteration_of(name)
        if iteration is not None and _complete(save, name):
            tags[iteration] = name
    return [tags[iteration] for iteration in sorted(tags)]


def lost_manifest(folder: Path) -> str | None:
    """Return the reason why a folder with a checkpoint's other files is incomplete, or None."""
    if (folder / MANIFEST).is_file() or not all((folder / n).is_file() for n in (INDEX, STATE)):
        return None
    return (
        f"{folder / MANIFEST} is missing, without which {folder.name} is not a complete checkpoint "
        "(its save was killed, or the file was deleted)"
    )


def may_be_ours(path: Path) -> bool:
    """True if a path is a checkpoint of this project or a folder of such, or would be if it had not
    lost a manifest."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or bool(complete_tags(path) or lost_manifests(path))


def lost_manifests(path: Path) -> list[str]:
    """:func:`lost_manifest` of a folder and of its subfolders named like checkpoints."""
    named = (path / name for name in sorted(os.listdir(path)) if iteration_of(name) is not None)
    return [lost for each in (path, *named) if (lost := lost_manifest(each))]


def find(load: str, wanted: str | None = None) -> Path | None:
    """The folder of the checkpoint to load: ``load`` itself, or in it the one of a tag
    (``global_step100``) or an iteration, by default the one that the tracker names (without a
    tracker: the newest complete one). None if there is no checkpoint, or the tracker names one of
    another format.

    Raises CheckpointError if the wanted checkpoint is missing or incomplete, the tracker is empty
    or names no checkpoint, or the folder's checkpoints are in another format.
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
            if named and (root / named).is_dir() and not (root / named / INDEX).is_file():
                return None  # of another format
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
    """Locks a folder of checkpoints, which is created if necessary, for one run; the file ``.lock``
    there names the holder. ``wait_seconds`` is for a holder on another host. Raises CheckpointError
    if another run saves there; OSError if the folder cannot be created or written to."""
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
