"""What the flags of a task name: files, folders, and the checkpoints that are evaluated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import FoundCheckpoint, locate_checkpoint, nothing_at
from megatron.config import CheckpointConfig, ConfigError
from megatron.training.resume import find_origin

_NAMES = re.compile(r"(?:global_step|iter_|checkpoint-)(\d+)")
"""Folders of one checkpoint: of this project and DeepSpeed, of Megatron, of Hugging Face."""


def wanted_checkpoints(
    options: CheckpointConfig, all_iterations: bool
) -> list[FoundCheckpoint | None]:
    """The checkpoint of ``--load``, [None] without a flag that names one, or else all of its
    checkpoints, in the order of their iterations. Raises CheckpointError without any."""
    if all_iterations:
        return list(checkpoints_in(options))
    origin = find_origin(options)
    if origin is None and options.load:
        raise CheckpointError(
            f"--load {options.load}: {nothing_at(options.load)}; name one to evaluate"
        )
    return [None if origin is None else origin.found]


def checkpoints_in(options: CheckpointConfig) -> list[FoundCheckpoint]:
    """Every complete checkpoint of the folder ``--load``, the first iteration first. Raises
    CheckpointError if it has none, or --load-tag chooses one."""
    if not options.load:
        raise CheckpointError("--all-iterations needs --load, the folder with the checkpoints")
    if options.load_tag:
        raise CheckpointError(
            f"--load-tag {options.load_tag} contradicts --all-iterations: give one of them"
        )
    load = Path(options.load)
    folders = {}
    for path in load.iterdir() if load.is_dir() else ():
        match = _NAMES.fullmatch(path.name)
        if match is not None and path.is_dir():
            folders[int(match[1])] = path
    found = [locate_checkpoint(folders[iteration]) for iteration in sorted(folders)]
    complete = [each for each in found if each is not None]
    if not complete:
        raise CheckpointError(
            f"--all-iterations: --load {load}: {nothing_at(load)}; it must be the folder of a run, "
            "with folders such as global_step100"
        )
    return complete


def check_inputs(flag: str, paths: Sequence[str | Path], folders: bool = False) -> None:
    """Raises ConfigError if one of the paths of a flag does not exist or is a folder; with
    ``folders``: is not one."""
    wanted = "folder" if folders else "file"
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"{flag} {path} does not exist; name a {wanted}")
        if path.is_dir() != folders:
            found = "folder" if path.is_dir() else "file"
            inside = f" in it, such as {_some(path)}" if found == "folder" and _some(path) else ""
            raise ConfigError(f"{flag} {path} is a {found}; name a {wanted}{inside}")


def _some(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir() if child.is_file())
    return names[0] if names else ""
