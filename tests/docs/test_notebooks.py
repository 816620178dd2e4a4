"""The notebooks of examples_deepspeed/: each cell runs, in order, in one empty folder.

Their commands are forked from a process that has imported everything, as those of the pages are. A
long test runs them in a kernel of Jupyter at their full length.
"""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_commands import Programs, understood

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples_deepspeed" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STEPS = "4"
"""Steps of each training here; a notebook has more."""


def cells(path: Path) -> list[str]:
    """The code of a notebook."""
    book = json.loads(path.read_text())
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def outputs(path: Path) -> str:
    """The outputs of a notebook's cells."""
    book = json.loads(path.read_text())
    shown = [out for cell in book["cells"] for out in cell.get("outputs", ())]
    return "".join("".join(out.get("text", ())) for out in shown)


def execute(path: Path, folder: Path, programs: Programs) -> tuple[str, dict]:
    """Runs a notebook's cells; returns what they print, and their names."""
    names: dict = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in cells(path):
            for part in re.split(r"^(!(?:.*\\\n)*.*\n?)", code, flags=re.MULTILINE):
                if part.startswith("!"):
                    command(part, names, programs)
                elif part.strip():
                    exec(compile(part, f"{path.name} in {folder}", "exec"), names)
    return printed.getvalue(), names


def command(text: str, names: dict, programs: Programs) -> None:
    """Runs a command of the shell, in which {} are values of Python."""
    line = re.sub(r"\\\n\s*", "", text.removeprefix("!")).strip()
    line = re.sub(r"\{(.+?)\}", lambda match: str(eval(match[1], names)), line)
    told = understood(line, shlex.split(line))
    assert told.program is not None, line
    status, shown = programs.run(str(ROOT / told.program), told.words, Path.cwd())
    print(shown)
    assert status == 0, f"{line}\n{shown}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, programs, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_STEPS", STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    printed, names = execute(path, tmp_path, programs)
    if path.stem == "text_to_chat":
        assert f"at step {STEPS}" in printed
        assert set(names["answers"]) == set(names["PEOPLE"])
        assert len(names["documents"]) == 20
    else:
        assert "read without this project, equal" in printed
        assert set(names["moved"]) == set(names["source"].names())
        assert all(0 < share < 1 for share in names["moved"].values())


def test_a_cell_that_fails_is_noticed(programs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "wrong.ipynb"
    source = {"cell_type": "code", "source": ["n = 3\n", "!megatron-layouts --nothing {n}\n"]}
    path.write_text(json.dumps({"cells": [source]}))
    with pytest.raises(AssertionError, match="unknown flag --nothing"):
        execute(path, tmp_path, programs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_output_is_of_these_cells(path):
    """The output that is committed: every cell has run, in order, and none has failed."""
    book = json.loads(path.read_text())
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {out["output_type"] for cell in code for out in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert path.stat().st_size < 60_000
    if path.stem == "text_to_chat":
        assert "6 of 6 are right" in outputs(path)
    for folder in (str(ROOT), str(Path.home())):
        assert folder not in path.read_text(), "a folder of one machine"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_exist(path):
    book = json.loads(path.read_text())
    text = "".join("".join(c["source"]) for c in book["cells"] if c["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / target).exists(), target


def test_output_is_kept_as_a_terminal_shows_it():
    """Without bars, colours and dates; only the standard library is needed to read the function."""
    text = (FOLDER / "run.py").read_text()
    (node,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == "as_shown")
    names: dict = {"re": re}
    exec(compile(ast.unparse(ast.fix_missing_locations(node)), "run.py", "exec"), names)
    bars = "\rtraining: 1%|  | 1/3\r      \r"
    shown = f"a\r\n{bars}[2026-11-29 15:32:03] step 1\r\n\x1b[2K[00] █████ 3\n"
    assert names["as_shown"](shown) == "a\nstep 1\n"


@pytest.mark.proof
def test_in_a_kernel():
    """At full length, as Jupyter runs them: the chat answers what it was taught."""
    for package in ("nbclient", "ipykernel"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (the extra notebooks)")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
