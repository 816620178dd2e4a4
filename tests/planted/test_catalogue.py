"""The catalogue of planted bugs fits the source; a sample of them is caught."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES  # noqa: E402
from communication import CATALOGUE  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", CATALOGUE, ids=lambda bug: bug.name)
def test_patch_fits(bug):
    assert bug.axis in CASES and bug.what
    ast.parse(bug.applied(ROOT))


def test_names_are_unique():
    assert len({bug.name for bug in CATALOGUE}) == len(CATALOGUE) >= 100


@pytest.mark.proof
def test_the_symbolic_check_catches_nine_of_ten(tmp_path):
    out = tmp_path / "planted.jsonl"
    command = [sys.executable, "tests/planted/run.py", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(results) == len(CATALOGUE)
    caught = sum(each["fault"] is not None for each in results)
    assert caught >= 0.9 * len(results)
