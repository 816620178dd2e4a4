"""Checkpoint folders: names, trackers, completeness.

::

    <save>/latest                             tag of the newest checkpoint, replaced last
    <save>/latest_checkpointed_iteration.txt  its iteration, as Megatron writes it
    <save>/global_step<N>/                    appears by a rename, when it is complete
        manifest.json                         size and SHA-256 of every file
        index.json                            which part of which parameter each file holds
        config.json, deepspeed.json           the resolved configuration
        state.json                            counters, loss scaler, layout
        weights-<rank>.safetensors            float32 weights
        optimizer-<rank>.safetensors          moments
        random-<rank>.safetensors             random state
        tokenizer/                            the tokenizer's files, in Hugging Face's form
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from megatron.checkpoint.files import (
    CheckpointError,
    checksum,
    read_json,
    sync_folder,
    write_json,
    write_text,
)

MANIFEST = "manifest.json"
TRACKER = "latest"
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
_TAG = re.compile(r"global_step(\d+)")


def tag(iteration: int) -> str:
    """Name of a checkpoint's folder."""
    return f"global_step{iteration}"


def incomplete_folder(save: Path, iteration: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return save / f".{tag(iteration)}.incomplete"


def remove_incomplete(save: Path) -> None:
    """Removes what killed saves left behind."""
    for folder in save.glob(".global_step*.incomplete"):
        shutil.rmtree(folder, ignore_errors=True)


def file_facts(path: Path) -> dict[str, int | str]:
    """What the manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def publish(save: Path, iteration: int, facts: dict[str, dict[str, int | str]]) -> Path:
    """Turns a fully written incomplete folder into the newest checkpoint.

    Args:
        save: folder of the checkpoints.
        iteration: the checkpoint's iteration.
        facts: manifest entry of every file in the folder.
    """
    written, final = incomplete_folder(save, iteration), save / tag(iteration)
    write_json(written / MANIFEST, {"format": 1, "files": dict(sorted(facts.items()))})
    sync_folder(written)
    replaced = None
    if final.exists():
        replaced = save / f".{tag(iteration)}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(written, final)
    sync_folder(save)
    write_text(save / MEGATRON_TRACKER, f"{iteration}\n")
    write_text(save / TRACKER, f"{tag(iteration)}\n")
    if replaced is not None:
        # The save has succeeded, whatever keeps the old folder from going.
        shutil.rmtree(replaced, ignore_errors=True)
    return final


def complete_tags(save: Path) -> list[str]:
    """Tags of all complete checkpoints in a folder, oldest first."""
    found = []
    for path in save.iterdir():
        match = _TAG.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[1]), path.name))
    return [name for _, name in sorted(found)]


def find(load: str, wanted: str | None = None) -> Path | None:
    """The checkpoint to load.

    Args:
        load: a folder of checkpoints, or one checkpoint.
        wanted: a tag (``global_step100``) or an iteration; None for the one that the tracker names
            (without a tracker: the newest complete one).

    Returns:
        The checkpoint's folder; None when the folder has no checkpoint at all.

    Raises:
        CheckpointError: the wanted checkpoint is not there or not complete, or the folder's
            checkpoints are in another format.
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
        return root / name
    tracker = root / TRACKER
    named = tracker.read_text().strip() if tracker.is_file() else ""
    if named and named not in known:
        raise CheckpointError(
            f"{tracker} names {named!r}, which is not a complete checkpoint in {root}; it has "
            f"{', '.join(known) or 'none'} (a save that was killed while it replaced one leaves "
            f"the old one as .{named}.replaced)"
        )
    if not named and not known:
        if (root / MEGATRON_TRACKER).is_file():
            raise CheckpointError(
                f"{root / MEGATRON_TRACKER} names a checkpoint, but {root} has none in this "
                "project's format"
            )
        return None
    return root / (named or known[-1])


def manifest(folder: Path) -> dict[str, dict[str, int | str]]:
    """Manifest entries of a checkpoint by file name.

    Raises:
        CheckpointError: there is no readable manifest.
    """
    content = read_json(folder / MANIFEST)
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or content.get("format") != 1:
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of format 1")
    return files


def verify(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compares files with the manifest.

    Args:
        folder: a checkpoint.
        share: check every ``shares``-th file only, from this one on, so that ranks can divide them.
        shares: number of ranks that divide the files.

    Raises:
        CheckpointError: a file is missing, too short or long, or its checksum differs.
    """
    for name, facts in list(manifest(folder).items())[share::shares]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {facts['bytes']}")
        if checksum(path) != facts["sha256"]:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's")
