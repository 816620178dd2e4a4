"""Runs the notebooks of this folder and keeps their output in them: `make notebooks`, or

    python examples_deepspeed/notebooks/run.py [--check] [NOTEBOOK ...]

Each runs in an empty folder. ``--check`` runs them and changes no file. NOTEBOOK_STEPS in the
environment shortens their trainings.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
TIMEOUT = 1200


def run(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the output of its cells. Raises CellExecutionError if one fails."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # The installed commands of this environment, as after `. .venv/bin/activate`.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        client = NotebookClient(
            book, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()
    for number, cell in enumerate(c for c in book.cells if c.cell_type == "code"):
        cell.metadata = {}
        cell.execution_count = number + 1
        text = "".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout")
        others = [out for out in cell.outputs if out.output_type != "stream"]
        streams = [nbformat.v4.new_output("stream", name="stdout", text=as_shown(text))]
        cell.outputs = others + (streams if text.strip() else [])
        for out in others:
            out.pop("execution_count", None)
    return book


def as_shown(text: str) -> str:
    """Return the lines that a terminal shows at the end, without progress bars and dates."""
    text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text.replace("\r\n", "\n"))
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    lines = [line for line in lines if not re.search(r"\d+%\||[█░]{5}", line)]
    return re.sub(r"^\[\d{4}-[^\]]+\] ", "", "\n".join(lines), flags=re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("notebooks", type=Path, nargs="*", metavar="NOTEBOOK")
    parser.add_argument("--check", action="store_true", help="change no file")
    arguments = parser.parse_args(argv)
    for path in arguments.notebooks or sorted(FOLDER.glob("*.ipynb")):
        book = run(path)
        if not arguments.check:
            nbformat.write(book, path)
        print(f"{path.name}: {len(book.cells)} cells ran")


if __name__ == "__main__":
    main()
