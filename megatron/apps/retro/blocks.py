"""Work in blocks: a file for each, which appears whole, over all processes of a run."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.features.retro.hdf5 import (
    array_shapes,
    read_array,
    write_arrays,
)
from megatron.features.retro.project import json_bytes
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

_SECONDS_BETWEEN_LINES = 15.0

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileBlock:
    """The items ``start`` to ``stop`` - 1 of a stage, and the file of what it makes of them."""

    start: int
    stop: int
    path: Path
    advance: Callable[[int], None] = field(default=lambda count: None, compare=False, repr=False)
    """Told how many items have just been done, for progress within a block; those that it was not
    told of count at the block's end."""

    def __len__(self) -> int:
        return self.stop - self.start


def blocks_of(folder: Path, count: int, size: int, first: int = 0) -> list[FileBlock]:
    """The blocks of the items ``first`` to ``count`` - 1, ``size`` each, as files START-END.hdf5
    whose numbers have as many digits as upstream writes: ceil(log10(count)) + 1."""
    digits = (len(str(count - 1)) if count > 1 else 0) + 1
    return [
        FileBlock(start, stop, folder / f"{start:0{digits}d}-{stop:0{digits}d}.hdf5")
        for start in range(first, count, size)
        for stop in (min(start + size, count),)
    ]


def begin_blocks(folder: Path, made_of: dict[str, Any]) -> None:
    """Makes a folder of blocks that depend on some values; the blocks of other values, which an
    earlier run left there, are deleted. To be called by one process."""
    path, content = folder / "made_of.json", json_bytes(made_of)
    if not path.is_file() or path.read_bytes() != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def barrier() -> None:
    """Waits for all processes of the run."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def rank() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """The number of processes of the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run_blocks(
    blocks: Sequence[FileBlock],
    make: Callable[[FileBlock], Mapping[str, np.ndarray]],
    what: str,
    unit: str = " chunks",
    validate: float | None = None,
) -> None:
    """Writes the files of the blocks that have none: each process makes its share, and returns when
    all have. With ``validate`` it makes that share of the files again instead, and compares.

    Args:
        make: the arrays of a block's file, by name.
        what: the stage, for progress and messages.
        unit: what a block has, for progress.

    Raises:
        ValueError: a file is not what ``make`` makes, or cannot be read.
        OSError: a file cannot be written.
    """
    for folder in {block.path.parent for block in blocks}:
        folder.mkdir(parents=True, exist_ok=True)
    if validate is not None:
        _validate(blocks, make, what, unit, validate)
        return
    barrier()  # nobody writes while all look
    missing = [block for block in blocks if not _finished(block)]
    barrier()
    finished = len(blocks) - len(missing)
    if finished and is_main_process():
        say(f"{what}: {finished} of {len(blocks)} blocks exist")
    for block in _progress(missing[rank() :: world_size()], what, unit):
        arrays = make(block)
        with naming_full_disks(block.path, what):
            write_arrays(block.path, arrays)
        del arrays  # those of one block are in memory
    barrier()


@contextmanager
def naming_full_disks(path: Path, what: str) -> Iterator[None]:
    """Says of a file of a stage, or of its project, that cannot be written what to do; an error
    that names its file already stays. Raises OSError."""
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
    """Whether a block's file exists; a damaged one is deleted."""
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
    """Compares the arrays of a file with others, bit for bit. ValueError, which names file and
    array, if they differ."""
    names = array_shapes(path).keys()
    for name in sorted(names ^ arrays.keys()):
        raise differing(path, name)
    for name in sorted(names):
        found, array = read_array(path, name), np.ascontiguousarray(arrays[name])
        same = found.dtype == array.dtype and found.shape == array.shape
        if not same or found.tobytes() != array.tobytes():
            raise differing(path, name)


def differing(path: Path, name: str) -> ValueError:
    """The error of an array that is not what a stage computes."""
    return ValueError(
        f"{path}: {name} is not what this run computes: the file is damaged, or was made of other "
        "data or by another version; delete it, and run the task without --retro-task-validate"
    )


def _progress(blocks: Sequence[FileBlock], what: str, unit: str) -> Iterator[FileBlock]:
    """The blocks, with rate and time left: a bar on a terminal, else a line now and then."""
    total = sum(map(len, blocks))
    with progress_bar(what, total=total, unit=unit) as bar:
        progress = _Progress(what, total, unit, bar.update)
        for block in blocks:
            after = progress.done + len(block)
            yield replace(block, advance=progress.advance)
            progress.advance(after - progress.done)


class _Progress:
    """Counts the items that are done, and tells the bar and the log."""

    def __init__(self, what: str, total: int, unit: str, bar: Callable[[int], object]) -> None:
        self._what, self._total, self._unit, self._bar = what, total, unit, bar
        self._begin = self._said = time.monotonic()
        self.done = 0

    def advance(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        self._bar(count)
        now = time.monotonic()
        if now - self._said < _SECONDS_BETWEEN_LINES or sys.stderr.isatty():
            return
        self._said, rate = now, self.done / (now - self._begin)
        left = (self._total - self.done) / rate
        if is_main_process():
            say(
                f"{self._what}: {self.done:,} of {self._total:,}{self._unit}, {rate:,.0f}/s, "
                f"{left / 60:.1f} min left"
            )
