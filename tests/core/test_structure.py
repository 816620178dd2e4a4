"""How much of the project a reader of ``pretrain_gpt.py`` has to read, counted; and the one door
to a model."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from import_statements import ROOT, closure, imported_files, sources

MOST_FILES = 157
"""That pretrain_gpt.py and its family import, themselves included."""
MOST_FRAMES = 14
"""Of ours, from ``main`` to the first matrix product of a step, both ends included."""

MOST_STATIONS = 8
"""Files of ours that get hold of a path from --data-path, or of what was opened there, up to the
loader; it goes from the configuration to the data and to no other package."""

FAMILIES = ROOT / "megatron" / "families"
sys.path.insert(0, str(ROOT / "docs" / "generate"))

import figures  # noqa: E402  # it draws the same calls for the documentation


def test_pretraining_imports_few_files():
    found = closure(ROOT / "pretrain_gpt.py", FAMILIES / "gpt.py")
    packages = Counter(str(path.parent.relative_to(ROOT)) for path in found)
    lines = "\n".join(f"{count:4} {package}" for package, count in sorted(packages.items()))
    assert len(found) <= MOST_FILES, f"pretrain_gpt.py imports {len(found)} files:\n{lines}"


def ours_of(program: str, flags: list[str], folder: Path) -> list[str]:
    """The lines "FILE: ..." that a program prints of files of ours, run in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", program, *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours = {str(path) for path in sources()}
    return [line for line in done.stdout.splitlines() if line.partition(":")[0] in ours]


@pytest.mark.features
def test_few_frames_lead_to_the_first_matrix_product():
    frames = figures.calls_of_a_step()
    assert frames[0] == ("main", "pretrain_gpt.py")
    assert any(file.startswith("parallel/") for _, file in frames[-3:])
    lines = "\n".join(f"{file} {function}" for function, file in frames)
    assert len(frames) <= MOST_FRAMES, f"{len(frames)} frames:\n{lines}"


THE_WAY_OF_A_PATH = """
import os, sys
import numpy as np
import pretrain_gpt
from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter

ROOT, PREFIX = os.path.dirname(pretrain_gpt.__file__), "the-books"
with IndexedDatasetWriter(PREFIX, "uint16") as writer:
    for number in range(50):
        writer.add_document([np.full(20, number % 9)])

def holds(value, depth=3):
    if isinstance(value, str):
        return PREFIX in value
    if depth and isinstance(value, tuple | list):
        return any(holds(each, depth - 1) for each in value)
    own = type(value).__module__.startswith("megatron.data") or type(value).__name__ == "DataConfig"
    return depth > 0 and own and holds(list(vars(value).values()), depth)

found = {}

def watch(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(os.path.join(ROOT, "megatron")):
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(holds(frame.f_locals[name]) for name in names if name not in ("self", "cls")):
        found.setdefault(code.co_filename, {})[code.co_name] = True
    if code.co_qualname == "MicroBatches.__init__":
        print(*(f"{file}: {', '.join(names)}" for file, names in found.items()), sep="\\n")
        sys.stdout.flush()
        os._exit(0)

sys.setprofile(watch)
pretrain_gpt.main()
"""


@pytest.mark.features
def test_a_data_path_passes_few_files(tmp_path):
    """From the command line to the loader: who parses, opens, indexes, reads."""
    flags = [*figures.SMALL_RUN, "--data-path", "the-books", "--split", "1,0,0"]
    lines = ours_of(THE_WAY_OF_A_PATH, flags, tmp_path)
    lines = [line for line in lines if "/util/" not in line]  # what is printed of it
    assert "loader.py" in lines[-1]
    packages = [line.removeprefix(f"{ROOT}/megatron/").partition("/")[0] for line in lines]
    assert packages == ["config"] + ["data"] * (len(lines) - 1)
    assert len(lines) <= MOST_STATIONS, f"{len(lines)} files:\n" + "\n".join(lines)


def test_gpt_is_reached_through_its_family():
    """Other code asks :func:`family_of`; features may build upon GPT."""
    doors = {
        FAMILIES / "gpt.py",
        ROOT / "megatron/model/gpt.py",
        ROOT / "megatron/data/gpt_dataset.py",
    }
    features = ROOT / "megatron" / "features"
    others = [path for path in sources() if path not in doors and features not in path.parents]
    pairs = [(path, door) for path in others for door in doors & imported_files(path)]
    pairs = [(path, door) for path, door in pairs if path.parent != FAMILIES]
    assert [f"{a.relative_to(ROOT)} imports {b.relative_to(ROOT)}" for a, b in pairs] == []
