"""Errors of libraries and of the system are told in one line."""

import signal
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


PRINTS = """
import socket, sys
from megatron.util.errors import end_with_reader
end_with_reader()
if sys.argv[1] == "socket":
    here, there = socket.socketpair()
    there.close()
    try:
        here.send(b"x")
    except BrokenPipeError:
        print("refused")
    sys.exit()
try:
    for number in range(int(sys.argv[1])):
        print("a line")
except OSError as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_ends_first(lines):
    """As `head`: no message, whether lines are written before or at the end."""
    command = [sys.executable, "-c", PRINTS, str(lines)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_socket_that_is_closed_remains_an_error():
    command = [sys.executable, "-c", PRINTS, "socket"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "refused\n", "")


SERVERS = {
    "dashboard.py", "launch_container.py", "quickstart.py", "run_text_generation_server.py",
    "start_nodes.py", "text_generation_cli.py",
}  # fmt: skip


def test_every_tool_ends_with_its_reader():
    tools = [path for path in (ROOT / "tools").rglob("*.py") if "__main__" in path.read_text()]
    without = {path.name for path in tools if "    end_with_reader()\n" not in path.read_text()}
    assert without == SERVERS
