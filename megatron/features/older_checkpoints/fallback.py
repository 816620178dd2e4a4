"""Handling of a damaged checkpoint: a run reports the newest older one that is intact, or loads it
and renames the damaged ones."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron.checkpoint.files import CheckpointError, DamagedError, write_text
from megatron.checkpoint.folder import (
    MEGATRON_TRACKER,
    TRACKER,
    UNIVERSAL,
    iteration_of,
    step_of,
    tag,
)
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint
from megatron.config import CheckpointConfig
from megatron.engine.loading import open_whole, together
from megatron.engine.train_engine import TrainEngine
from megatron.training.resume import ResumeSource, load_finite, saves_next_to


def newest_older(
    options: CheckpointConfig, found: FoundCheckpoint | None, error: CheckpointError
) -> tuple[Path, FoundCheckpoint]:
    """Find an older checkpoint before an engine is built. Return the folder of the checkpoint of
    ``--load`` that could not be found or opened because of ``error``, and the newest older one that
    can be. Raises CheckpointError if the flags do not allow this or no such checkpoint exists."""
    load = Path(options.load or "")
    wanted = options.load_tag or _named_by_tracker(load) or "?"
    # The tracker may contain anything, but the checkpoints are in the same folder.
    named = load / (tag(int(wanted)) if wanted.isdecimal() else Path(wanted).name or "?")
    folder = named if found is None else found.folder
    for older in _older(options, folder):
        if options.falls_back:
            return folder, older
        raise CheckpointError(
            f"{error}; --on-damaged-checkpoint previous takes {older.folder}"
        ) from None
    raise error


def load_older(
    engine: TrainEngine, origin: ResumeSource, reason: DamagedError
) -> tuple[Source, ResumeSource]:
    """Load the newest older checkpoint that is intact. All ranks must call this function. Raises
    DamagedError on all ranks if the flags do not allow this or no such checkpoint exists. In the
    first case the message names the checkpoint."""
    options, damaged = engine.config.checkpoint, dict(origin.damaged)
    folder = origin.found.folder
    if origin.flag != f"--load {options.load}":
        raise reason
    damaged[folder] = str(reason)
    for checkpoint in _of_all_ranks(engine, list(_older(options, folder))):
        older = replace(origin, found=checkpoint._replace(base=origin.found.base), damaged=damaged)
        try:
            if options.falls_back:
                return load_finite(engine, older), older
            open_whole(engine, older.found)
        except DamagedError as error:
            damaged[checkpoint.folder] = str(error)
            continue
        raise DamagedError(
            f"{reason}; the older {checkpoint.folder} is whole: --on-damaged-checkpoint previous "
            "continues from it"
        )
    raise DamagedError(f"{reason}; no older checkpoint in {folder.parent} is whole")


def set_damaged_aside(engine: TrainEngine, origin: ResumeSource) -> list[str]:
    """Rename the damaged checkpoints that were skipped, so that they are neither replaced nor
    deleted, and make the trackers name the checkpoint that was loaded. This only happens if the run
    saves to the same folder. All ranks must call this function; the first does the work and returns
    a line about each damaged checkpoint. Raises OSError or CheckpointError if it fails."""
    options, folder = engine.config.checkpoint, origin.found.folder
    same_folder = bool(options.save) and saves_next_to(Path(options.save or ""), origin, options)

    def set_all_aside() -> list[str]:
        lines = []
        for each, reason in origin.damaged.items():
            line = f"taken since {reason}"
            if same_folder and step_of(each.name) is not None and each.is_dir():
                line += f"; {each} is set aside as {set_aside(each)}"
            lines.append(line)
        if same_folder:
            point_to(folder)
        return lines

    return together(engine, set_all_aside if engine.mesh.world.rank == 0 else list)


def _named_by_tracker(save: Path) -> str:
    tracker = save / TRACKER
    return tracker.read_text(errors="replace").strip() if tracker.is_file() else ""


def _older(options: CheckpointConfig, folder: Path) -> Iterator[FoundCheckpoint]:
    """Yield the readable checkpoints next to a damaged one that are older, newest first. Yield all
    if the damaged one's name does not show its age."""
    prefer = "universal" if options.universal_checkpoint else "native"
    for iteration in iterations_in(folder.parent, step_of(folder.name)):
        with contextlib.suppress(CheckpointError, OSError):
            checkpoint = locate_checkpoint(folder.parent, str(iteration), prefer)
            if checkpoint is not None:
                checkpoint.open(verify=False)
                yield checkpoint


def _of_all_ranks(engine: TrainEngine, found: list[FoundCheckpoint]) -> list[FoundCheckpoint]:
    """Return the checkpoints that every rank can find, so that all ranks try the same ones."""
    world = engine.mesh.world
    if world.size == 1:
        return found
    names = [[each.folder.name for each in found]] * world.size
    dist.all_gather_object(names, names[world.rank])
    return [each for each in found if all(each.folder.name in those for those in names)]


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not loaded, replaced or deleted, and return its
    new path. Raises OSError if it cannot be renamed."""
    for number in itertools.count():
        aside = folder.with_name(f".{folder.name}.damaged{f'-{number}' if number else ''}")
        if not aside.exists():
            os.rename(folder, aside)
            return aside
    raise AssertionError


def point_to(folder: Path) -> None:
    """Point the trackers to a checkpoint or universal copy. Raises OSError on failure."""
    if folder.name.endswith(UNIVERSAL):
        write_text(folder.parent / f"{TRACKER}{UNIVERSAL}", folder.name)
    elif iteration_of(folder.name) is not None:
        write_text(folder.parent / MEGATRON_TRACKER, f"{iteration_of(folder.name)}")
        write_text(folder.parent / TRACKER, folder.name)


def iterations_in(save: Path, before: int | None = None) -> list[int]:
    """Return the iterations of the checkpoints and universal copies in a folder, newest first. With
    ``before``, return only smaller ones."""
    names = [path.name for path in save.iterdir()] if save.is_dir() else []
    iterations = {iteration for name in names if (iteration := step_of(name)) is not None}
    return sorted((n for n in iterations if before is None or n < before), reverse=True)
