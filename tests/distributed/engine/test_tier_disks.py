"""Disks of states in files, as real file systems: slow, full in the middle, failed, read-only.

The weights are those of the same run in main memory, bit by bit, or the disk is named on all ranks
and the last checkpoint is whole."""

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from faults.storage import THROTTLE, ext4_disk, memory_disk
from training_jobs import TINY, train

from megatron.engine.train_engine import TrainEngine
from megatron.util.errors import FaultError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounts need root"
)
FLAGS = [*TINY, "--bf16", "--save-interval", "2"]
KEY = "zero_optimization.offload_optimizer.nvme_path"
RATE = 2**19
"""Bytes a second of a slow disk, in each direction."""


def argv(tmp_path, disk, steps, name, *more):
    """Flags of a run with its states in a folder, or in main memory (None)."""
    place = {"device": "cpu"} if disk is None else {"device": "nvme", "nvme_path": str(disk)}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    flags = [*FLAGS, "--train-iters", str(steps), "--save", str(tmp_path / name)]
    return [*flags, "--deepspeed_config", str(path), *more]


def tried(argv, events=(), folder=""):
    """Train, with something done before some steps, and return the message of what ends it and
    seconds of that. ``events``: functions of this module by step, counted from 1, None for all.
    For the pool."""
    count, seconds = 0, 0.0
    step = TrainEngine.train_step

    def preceded(engine, *args):
        nonlocal count, seconds
        count += 1
        begin = time.monotonic()
        for at, event in events:
            if at in (count, None):
                event(folder)
        seconds += time.monotonic() - begin
        return step(engine, *args)

    with mock.patch.object(TrainEngine, "train_step", preceded):
        try:
            train(argv)
        except (ValueError, FaultError) as error:
            return str(error), seconds
    return None, seconds


def fill(folder):
    """Leave no room on the disk of a folder; for one rank."""
    if os.environ["RANK"] == "0":
        with open(f"{folder}/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))


def evict(folder):
    """Write all pages of a folder's mapped files to its disk, and drop them from memory."""
    library, page = ctypes.CDLL(None, use_errno=True), os.sysconf("SC_PAGESIZE")
    lines = [each for each in Path("/proc/self/maps").read_text().splitlines() if folder in each]
    assert lines
    for line in lines:
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        where = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
        resident = (ctypes.c_ubyte * ((end - first) // page))()
        for _ in range(100):
            assert library.msync(*where, 4) == 0, os.strerror(ctypes.get_errno())
            assert library.madvise(*where, 21) == 0, os.strerror(ctypes.get_errno())  # PAGEOUT
            assert library.mincore(*where, resident) == 0
            if not any(flag & 1 for flag in resident):
                break
        else:
            raise AssertionError(f"{sum(resident)} pages of {line} stay in memory")


def saved(tmp_path, name, step):
    folder = tmp_path / name / f"global_step{step}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


@pytest.fixture
def undisturbed(pool, tmp_path):
    """The tensors of a run of four steps in main memory; its checkpoints are in ``memory``."""
    pool.run(2, train, argv(tmp_path, None, 4, "memory"))
    return saved(tmp_path, "memory", 4)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["ext4", "memory"])
def test_a_disk_that_is_full_in_the_middle_changes_nothing(kind, pool, tmp_path, undisturbed):
    """Another program takes all room that is left: that of the files is reserved."""
    make = ext4_disk if kind == "ext4" else lambda folder: memory_disk(folder, 16)
    with make(tmp_path / "disk") as disk:
        flags = argv(tmp_path, disk.folder, 4, "full")
        results = pool.run(2, tried, flags, ((1, fill),), str(disk.folder))
        assert [error for error, _ in results] == [None, None]
        assert os.statvfs(disk.folder).f_bavail == 0 and (disk.folder / "filler").exists()
    assert saved(tmp_path, "full", 4) == undisturbed


@pytest.mark.proof
@pytest.mark.skipif(
    not Path(THROTTLE.format("write")).exists(), reason="no control group slows a disk down"
)
def test_a_slow_disk_is_waited_for(pool, tmp_path, undisturbed):
    """Nothing stays in memory between steps: each step waits for all reads and writes."""
    with ext4_disk(tmp_path / "disk") as disk:
        disk.slow_down(RATE)
        before = disk.traffic()
        flags = argv(tmp_path, disk.folder, 4, "slow")
        results = pool.run(2, tried, flags, ((None, evict),), str(disk.folder))
        assert [error for error, _ in results] == [None, None]
        read, written = (now - then for now, then in zip(disk.traffic(), before, strict=True))
        states = sum(len(data) for data in undisturbed.values())
        assert read > 2 * states and written > 2 * states
        assert max(seconds for _, seconds in results) > written / RATE / 4
    assert saved(tmp_path, "slow", 4) == undisturbed


def test_a_disk_that_loses_pages_is_named_before_a_save(pool, tmp_path, undisturbed):
    """The system does not tell a program that it could not write a page of a mapped file, and
    forgets it: the run ends instead of saving, and continues from its checkpoint elsewhere."""
    load = ["--load", str(tmp_path / "memory"), "--load-tag", "2"]
    with (
        memory_disk(tmp_path / "below", 24) as below,
        ext4_disk(tmp_path / "disk", below) as disk,
    ):
        flags = argv(tmp_path, disk.folder, 4, "lost", *load)
        results = pool.run(2, tried, flags, ((1, fill),), str(below.folder))
    errors = {error for error, _ in results}
    assert len(errors) == 1, errors
    message = errors.pop()
    assert f"rank 0: {KEY} {tmp_path / 'disk'}: " in message
    assert "has not taken all weights and moments of iteration 4" in message
    assert f"last good checkpoint is {tmp_path / 'memory' / 'global_step2'}" in message
    assert not list((tmp_path / "lost").glob("global_step*"))
    good = tmp_path / "good"
    good.mkdir()
    pool.run(2, train, argv(tmp_path, good, 4, "again", *load))
    assert saved(tmp_path, "again", 4) == undisturbed


def test_a_read_only_disk_is_named_before_the_first_step(pool, tmp_path):
    with ext4_disk(tmp_path / "disk") as disk:
        disk.fail()
        error, _ = pool.run(1, tried, argv(tmp_path, disk.folder, 4, "none"))[0]
    assert f"{KEY} {tmp_path / 'disk'}: no file can be made there: Read-only file system" in error
    assert not list((tmp_path / "none").glob("global_step*"))
