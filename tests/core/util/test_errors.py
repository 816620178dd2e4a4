"""Errors of libraries and of the system are told in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.util.errors import one_line

ROOT = Path(__file__).parents[3]

READS_LOST_PAGES = """
import mmap, os, sys
from megatron.util.errors import name_lost_pages
name_lost_pages()
with open(sys.argv[1], "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0)
    os.truncate(sys.argv[1], 100)
    print("before", end="")
    pages[2**16]
"""


linux = pytest.mark.skipif(sys.platform != "linux", reason="the signal's data are those of Linux")


@linux
def test_a_mapped_file_that_is_cut_short_is_named(tmp_path):
    """In place of death by SIGBUS, and what was printed before is not lost."""
    file = tmp_path / "long name.npy"
    file.write_bytes(bytes(2**17))
    command = [sys.executable, "-c", READS_LOST_PAGES, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "before"
    assert done.stderr.startswith(f"error: {file} was cut short or deleted while it was read, and ")
    assert done.stderr.count("\n") == 1


WRITES_WITHOUT_ROOM = """
import mmap, os, sys, tempfile
from megatron.util.errors import name_lost_pages
name_lost_pages()
with tempfile.TemporaryFile(dir=sys.argv[1]) as file:
    os.truncate(file.fileno(), 2**17)
    pages = mmap.mmap(file.fileno(), 0)
    os.truncate(file.fileno(), 0)
    pages[2**16] = 1
"""


@linux
def test_a_file_that_has_no_name_is_told_by_its_folder(tmp_path):
    command = [sys.executable, "-c", WRITES_WITHOUT_ROOM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    told = "cannot be used: its disk has failed or is full\n"
    assert done.stderr == f"error: a file in {tmp_path} {told}"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("x.json: a\n  b\r\nc", "x.json: a b c"),
        ("\x1b[31m\0\ud800\u200b", "\\x1b[31m\\x00\\ud800\u200b"),
        ("a " + "x" * 70_000 + " b", f"a {'x' * 500}[... 69,400 characters ...]{'x' * 100} b"),
        ("ab " * 5_000 + "c", f"{'ab ' * 2_000}[... 8,001 characters ...]{'ab ' * 333}c"),
    ],
)
def test_messages_are_one_line(message, line):
    assert one_line(ValueError(message)) == line
