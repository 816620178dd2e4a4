"""Errors of libraries and of the system are told in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="the signal's data are those of Linux")
def test_a_mapped_file_that_is_cut_short_is_named(tmp_path):
    """In place of death by SIGBUS, and what was printed before is not lost."""
    file = tmp_path / "long name.npy"
    file.write_bytes(bytes(2**17))
    command = [sys.executable, "-c", READS_LOST_PAGES, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stdout == "before"
    assert done.stderr.startswith(f"error: {file} was cut short or deleted while it was read, and ")
    assert done.stderr.count("\n") == 1
