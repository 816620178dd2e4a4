"""One run at a time saves into a folder, whatever becomes of the process that did."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time

import pytest

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import LOCK, lock_folder

FORK = multiprocessing.get_context("fork")  # another process that needs to import nothing


def hold(folder, held, seconds=1000.0):
    """Takes the lock of a folder, says so, and keeps it."""
    lock = lock_folder(folder)
    held.set()
    time.sleep(seconds)
    assert lock is not None


def hold_after_fork(folder, held):
    """The same, with a worker that has the lock's file open, too."""
    lock = lock_folder(folder)
    FORK.Process(target=time.sleep, args=(1000,)).start()
    held.set()
    time.sleep(1000)
    assert lock is not None


def started(target, folder):
    """A process that has the lock of a folder, in a session of its own."""
    held = FORK.Event()
    process = FORK.Process(target=in_a_session, args=(target, folder, held))
    process.start()
    assert held.wait(60)
    return process


def in_a_session(target, *args):
    os.setsid()
    target(*args)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = started(hold, tmp_path)
    yield process
    process.kill()
    process.join()


def test_another_run_is_refused_until_it_is_killed(tmp_path, holder):
    with pytest.raises(CheckpointError, match=f"process {holder.pid} on .* is saving there"):
        lock_folder(tmp_path)
    holder.kill()
    holder.join()
    lock_folder(tmp_path).release()


def test_a_released_folder_is_free(tmp_path):
    lock_folder(tmp_path / "new").release()
    other = FORK.Process(target=hold, args=(tmp_path / "new", FORK.Event(), 0))
    other.start()
    other.join(60)
    assert other.exitcode == 0


def test_workers_of_a_killed_run_do_not_keep_it(tmp_path):
    """Data loaders fork; they outlive a killed parent by seconds."""
    process = started(hold_after_fork, tmp_path)
    try:
        with pytest.raises(CheckpointError, match="is saving there"):
            lock_folder(tmp_path)
        process.kill()
        process.join()
        lock_folder(tmp_path).release()
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_holder_on_another_host_is_waited_for(tmp_path, holder):
    lines = []
    (tmp_path / LOCK).write_text("process 7 on far-away\n")
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="process 7 on far-away is saving there"):
        lock_folder(tmp_path, lines.append, wait_seconds=0.3)
    assert time.monotonic() - began > 0.3
    assert len(lines) == 1 and "waiting for process 7 on far-away" in lines[0]


def test_file_systems_without_locks_are_said(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lines = []
    lock_folder(tmp_path, lines.append).release()
    assert "has no locks (No locks available)" in lines[0]
