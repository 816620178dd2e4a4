"""Work in blocks that are distributed over all processes of a run. Each block is written to a
separate file, atomically, so that an interrupted run can be resumed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import ParallelConfig, Setting, Settings
from megatron.engine.environment import distributed
from megatron.features.agreement.facts import given_facts, program_facts
from megatron.features.retro.hdf5 import array_shapes, read_array, write_arrays
from megatron.features.retro.project import json_bytes
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

_SECONDS_BETWEEN_LINES = 15.0
_WAITING_MINUTES = 14.0 * 24 * 60
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileBlock:
    """Items ``start`` to ``stop`` - 1 of a stage, and their output file. ``advance`` is called with
    the number of items just completed, to show progress within the block."""

    start: int
    stop: int
    path: Path
    advance: Callable[[int], None] = field(default=lambda count: None, compare=False, repr=False)

    def __len__(self) -> int:
        return self.stop - self.start


def blocks_of(folder: Path, count: int, size: int, first: int = 0) -> list[FileBlock]:
    """Return blocks of ``size`` items for the items ``first`` to ``count`` - 1. Their files are
    named START-END.hdf5, with as many digits as upstream uses: ceil(log10(count)) + 1."""
    digits = (len(str(count - 1)) if count > 1 else 0) + 1
    return [
        FileBlock(start, stop, folder / f"{start:0{digits}d}-{stop:0{digits}d}.hdf5")
        for start in range(first, count, size)
        for stop in (min(start + size, count),)
    ]


def begin_blocks(folder: Path, made_of: dict[str, Any]) -> None:
    """Create a folder for blocks that depend on the values in ``made_of``. Existing blocks that an
    earlier run computed from other values are deleted. Must be called by only one process."""
    path, content = folder / "made_of.json", json_bytes(made_of)
    if not path.is_file() or path.read_bytes() != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def connected(settings: Settings, processes: int) -> AbstractContextManager[object]:
    """Return a context that connects the processes of a run. The default timeout is days, since all
    wait for the slowest. They only synchronize, so gloo suffices on GPUs too."""
    if processes == 1:
        return nullcontext()
    minutes = settings.get("distributed_timeout_minutes", Setting(_WAITING_MINUTES, "default"))
    local_rank = settings.get("local_rank", Setting(None, "default"))
    return distributed(
        ParallelConfig(
            distributed_backend="gloo",
            distributed_timeout_minutes=minutes.value,
            local_rank=local_rank.value,
        ),
        lambda: {**given_facts(settings), **program_facts()},
    )


def barrier() -> None:
    """Wait for all processes of the run."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def run_blocks(
    blocks: Sequence[FileBlock],
    make: Callable[[FileBlock], Mapping[str, np.ndarray]],
    what: str,
    unit: str = " chunks",
    validate: float | None = None,
) -> None:
    """Compute the blocks whose files do not exist yet, and write the named arrays that ``make``
    returns. With ``validate``, recompute that fraction of the existing files and compare them
    instead. Collective: the processes share the blocks, and all return when all blocks are done.
    ``what`` (the stage) and ``unit`` (of an item) appear in messages. Raises ValueError if a file
    differs or cannot be read, and OSError if a file cannot be written."""
    for folder in {block.path.parent for block in blocks}:
        folder.mkdir(parents=True, exist_ok=True)
    if validate is not None:
        _validate(blocks, make, what, unit, validate)
        return
    barrier()  # no process may write while another still lists the files
    missing = [block for block in blocks if not _finished(block)]
    barrier()
    finished = len(blocks) - len(missing)
    if finished and is_main_process():
        say(f"{what}: {finished} of {len(blocks)} blocks exist")
    for block in _progress(missing[rank() :: world_size()], what, unit):
        arrays = make(block)
        with naming_full_disks(block.path, what):
            write_arrays(block.path, arrays)
        del arrays  # keep only one block's arrays in memory
    barrier()


@contextmanager
def naming_full_disks(path: Path, what: str) -> Iterator[None]:
    """Add advice for the user to an OSError about a file that cannot be written. Errors that
    already contain advice, or that report a missing file, are re-raised unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno in (None, errno.ENOENT):
            raise
        remedy = "free space on the disk" if error.errno in _FULL else "allow writing there"
        raise OSError(
            f"{error.filename or path} cannot be written: {error.strerror}; {remedy}, and run "
            f"{what} again: it continues after the files that it has finished"
        ) from error


def _finished(block: FileBlock) -> bool:
    """Return whether a block's file exists and is intact. A damaged file is deleted."""
    if not block.path.exists():
        return False
    try:
        array_shapes(block.path)
    except ValueError as error:
        logger.warning("%s; it is made again", error)
        block.path.unlink(missing_ok=True)
        return False
    return True


def _validate(
    blocks: Sequence[FileBlock],
    make: Callable[[FileBlock], Mapping[str, np.ndarray]],
    what: str,
    unit: str,
    share: float,
) -> None:
    existing = [block for block in blocks if block.path.exists()]
    if not existing:
        if is_main_process():
            folders = ", ".join(sorted({str(block.path.parent) for block in blocks}))
            logger.warning("%s: nothing is compared: no block in %s", what, folders)
        return
    count = round(share * len(existing)) or min(1, len(existing))
    chosen = [existing[i * len(existing) // count] for i in range(count)]
    for block in _progress(chosen[rank() :: world_size()], f"{what}: validating", unit):
        check_equal(block.path, make(block))
    barrier()
    if is_main_process():
        say(f"{what}: {count} of {len(existing)} blocks made again, all equal")


def check_equal(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Compare a file with the arrays bit for bit. Raises ValueError if they differ."""
    names = array_shapes(path).keys()
    for name in sorted(names ^ arrays.keys()):
        raise differing(path, name)
    for name in sorted(names):
        stored, array = read_array(path, name), np.ascontiguousarray(arrays[name])
        same = stored.dtype == array.dtype and stored.shape == array.shape
        if not same or stored.tobytes() != array.tobytes():
            raise differing(path, name)


def differing(path: Path, name: str) -> ValueError:
    """Return the error for a stored array that differs from the computed one."""
    return ValueError(
        f"{path}: {name} is not what this run computes: the file is damaged, or was made of other "
        "data or by another version; delete it, and run the task without --retro-task-validate"
    )


def _progress(blocks: Sequence[FileBlock], what: str, unit: str) -> Iterator[FileBlock]:
    """Yield the blocks, and show rate and remaining time: a bar on terminals, otherwise lines at
    intervals."""
    total, done = sum(map(len, blocks)), 0
    begin = said = time.monotonic()
    with progress_bar(what, total=total, unit=unit) as bar:

        def advance(count: int) -> None:
            nonlocal done, said
            done += count
            bar.update(count)
            now = time.monotonic()
            if now - said < _SECONDS_BETWEEN_LINES or sys.stderr.isatty():
                return
            said, rate = now, done / (now - begin)
            left = (total - done) / rate
            if is_main_process():
                say(f"{what}: {done:,} of {total:,}{unit}, {rate:,.0f}/s, {left / 60:.1f} min left")

        for block in blocks:
            after = done + len(block)
            yield replace(block, advance=advance)
            advance(after - done)
