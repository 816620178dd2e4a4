"""Work in blocks: a file for each, which appears whole, over all processes of a run."""

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
    """The items ``start`` to ``stop`` - 1 of a stage, and its output file. ``advance`` is called
    with the number of items just completed, for progress within a block."""

    start: int
    stop: int
    path: Path
    advance: Callable[[int], None] = field(default=lambda count: None, compare=False, repr=False)

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


def connected(settings: Settings, processes: int) -> AbstractContextManager[object]:
    """The processes of a run, which wait for the slowest one, by default for days. They only
    exchange that they have finished, so gloo suffices on GPUs too."""
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
    """Waits for all processes of the run."""
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
    """Writes the files of the blocks that have none, with the arrays of ``make`` by name: each
    process makes its share, and returns when all have. With ``validate`` it makes that share of the
    files again instead, and compares. ``what`` (the stage) and ``unit`` (of a block) are for
    messages. ValueError if a file differs or cannot be read, OSError if it cannot be written."""
    for folder in {block.path.parent for block in blocks}:
        folder.mkdir(parents=True, exist_ok=True)
    if validate is not None:
        _validate(blocks, make, what, unit, validate)
        return
    barrier()  # no process writes while others look
    missing = [block for block in blocks if not _finished(block)]
    barrier()
    finished = len(blocks) - len(missing)
    if finished and is_main_process():
        say(f"{what}: {finished} of {len(blocks)} blocks exist")
    for block in _progress(missing[rank() :: world_size()], what, unit):
        arrays = make(block)
        with naming_full_disks(block.path, what):
            write_arrays(block.path, arrays)
        del arrays  # only one block's are in memory
    barrier()


@contextmanager
def naming_full_disks(path: Path, what: str) -> Iterator[None]:
    """Re-raise an OSError about a file of a stage or project that cannot be written, with advice
    unless it already has some."""
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
    """True if a block's file exists; a damaged one is deleted."""
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
    """Compares the arrays of a file with others, bit for bit. ValueError if they differ."""
    names = array_shapes(path).keys()
    for name in sorted(names ^ arrays.keys()):
        raise differing(path, name)
    for name in sorted(names):
        stored, array = read_array(path, name), np.ascontiguousarray(arrays[name])
        same = stored.dtype == array.dtype and stored.shape == array.shape
        if not same or stored.tobytes() != array.tobytes():
            raise differing(path, name)


def differing(path: Path, name: str) -> ValueError:
    """The error of an array that is not what a stage computes."""
    return ValueError(
        f"{path}: {name} is not what this run computes: the file is damaged, or was made of other "
        "data or by another version; delete it, and run the task without --retro-task-validate"
    )


def _progress(blocks: Sequence[FileBlock], what: str, unit: str) -> Iterator[FileBlock]:
    """The blocks, with rate and time left: a bar on a terminal, else a line at intervals."""
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
