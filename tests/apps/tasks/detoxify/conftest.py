"""Files of rows, and a scorer that needs no package."""

import json
import sys

import pytest


@pytest.fixture
def written(tmp_path):
    """Writes a file of JSON lines; a str is a line as it is."""

    def write(name, rows):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write


@pytest.fixture
def loud(tmp_path):
    """A command that scores by exclamation marks, and notes each text that it gets."""
    program = tmp_path / "loud.py"
    program.write_text(
        "import sys\n"
        f"log = open({str(tmp_path / 'loud.log')!r}, 'a')\n"
        "for line in sys.stdin:\n"
        "    log.write(line)\n"
        "    print(min(line.count('!') / 10, 1))\n"
    )
    return f"{sys.executable} -S {program}"
