"""One run at a time saves into a folder, whatever becomes of the process that did."""

import errno
import fcntl
import subprocess
import sys
import time

import pytest

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import LOCK, lock_folder

HOLD = """
import sys, time
from pathlib import Path
from megatron.checkpoint.folder import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_another_run_is_refused_until_it_is_killed(tmp_path, holder):
    with pytest.raises(CheckpointError, match=f"process {holder.pid} on .* is saving there"):
        lock_folder(tmp_path)
    holder.kill()
    holder.wait()
    lock_folder(tmp_path).release()


def test_a_released_folder_is_free(tmp_path):
    lock_folder(tmp_path / "new").release()
    other = [sys.executable, "-c", HOLD.replace("time.sleep(1000)", ""), str(tmp_path / "new")]
    assert subprocess.run(other, capture_output=True, text=True).stdout == "held\n"


def test_workers_of_a_killed_run_do_not_keep_it(tmp_path):
    """Data loaders fork; they outlive a killed parent by seconds."""
    forking = HOLD.replace("print(", "import os\nif not os.fork(): print(")
    process = subprocess.Popen(
        [sys.executable, "-c", forking, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="is saving there"):
            lock_folder(tmp_path)
        process.kill()
        process.wait()
        lock_folder(tmp_path).release()
    finally:
        import os
        import signal

        os.killpg(process.pid, signal.SIGKILL)


def test_a_holder_on_another_host_is_waited_for(tmp_path, holder):
    lines = []
    (tmp_path / LOCK).write_text("process 7 on far-away\n")
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="process 7 on far-away is saving there"):
        lock_folder(tmp_path, lines.append, wait_seconds=1.5)
    assert time.monotonic() - began > 1.5
    assert len(lines) == 1 and "waiting for process 7 on far-away" in lines[0]


def test_file_systems_without_locks_are_said(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lines = []
    lock_folder(tmp_path, lines.append).release()
    assert "has no locks (No locks available)" in lines[0]
