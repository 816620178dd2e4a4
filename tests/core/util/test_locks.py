"""One process at a time, whatever becomes of it."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.util.files import Lock, LockTakenError

HOLD = """
import os, sys, time
from megatron.util.files import Lock
lock = Lock(sys.argv[1])
if not os.fork():
    print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock and has forked, with a child that outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_it_is_refused_at_once_and_free_after_a_kill(tmp_path, holder):
    with pytest.raises(LockTakenError):
        Lock(tmp_path / "lock")
    holder.kill()
    holder.wait()
    Lock(tmp_path / "lock").release()


def test_it_is_waited_for(tmp_path, holder):
    began = time.monotonic()
    with pytest.raises(LockTakenError):
        Lock(tmp_path / "lock", wait_seconds=0.3)
    assert time.monotonic() - began > 0.3
    holder.kill()
    with Lock(tmp_path / "lock", wait_seconds=-1):
        pass


def test_what_the_file_holds_stays(tmp_path):
    (tmp_path / "lock").write_text("data")
    with Lock(tmp_path / "lock"), pytest.raises(LockTakenError):
        Lock(tmp_path / "lock")
    with Lock(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == "data"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Lock(tmp_path / "lock") as lock:
        assert lock.missing == "No locks available"


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Lock(tmp_path / "none" / "lock")


def test_others_in_a_group_can_lock_it_too(tmp_path):
    context = multiprocessing.get_context("fork")

    def make():
        os.umask(0o002)
        Lock(tmp_path / "lock")

    process = context.Process(target=make)
    process.start()
    process.join()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664
