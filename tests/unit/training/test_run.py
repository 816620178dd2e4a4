"""How a training command ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from megatron.training.run import end_process_after
atexit.register(print, "handler")

class Finalised:
    def __del__(self):
        print("taken apart")

kept = Finalised()

def command():
    print("output")
    {end}

end_process_after(command)
"""


@pytest.mark.parametrize(
    ("end", "status", "errors"),
    [
        ("", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('wrong')", 1, "wrong\n"),
    ],
)
def test_process_ends_at_once_with_its_status(end, status, errors):
    """Output is flushed and exit handlers run, but the interpreter is not finalised."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True
    )
    assert done.returncode == status
    assert done.stdout == "output\nhandler\n"
    assert done.stderr == errors


def test_an_unexpected_error_keeps_its_traceback():
    program = PROGRAM.format(end="raise KeyError('x')")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "KeyError: 'x'" in done.stderr
