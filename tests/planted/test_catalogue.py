"""The catalogue of planted bugs fits the source; what was run is in its table."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import run  # noqa: E402
from cases import CASES  # noqa: E402
from catalogue import CATALOGUE  # noqa: E402

ROOT = Path(__file__).parents[2]


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_patches_fit():
    misfits = {
        bug.name: count
        for bug in CATALOGUE
        if (count := text_of(f"megatron/{bug.file}").count(bug.old)) != 1 or bug.old == bug.new
    }
    assert misfits == {}, "their old texts are so many times in the source"


@pytest.mark.proof
@pytest.mark.parametrize("bug", CATALOGUE, ids=lambda bug: bug.name)
def test_patches_are_code(bug):
    ast.parse(bug.applied(ROOT))


def test_each_bug_can_be_caught():
    """The symbolic check looks for those of its axes, and others name tests, which exist."""
    assert [bug.name for bug in CATALOGUE if bug.axis not in CASES and not bug.tests] == []
    missing = set()
    for test in {test for bug in CATALOGUE for test in bug.tests}:
        file, _, case = test.partition("::")
        path, name = f"tests/{file}", case.partition("[")[0]
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in text_of(path)):
            missing.add(test)
    assert missing == set()


def test_the_catalogue_is_broad():
    assert len({bug.name for bug in CATALOGUE}) == len(CATALOGUE) >= 300
    by_axis = Counter(bug.axis for bug in CATALOGUE)
    assert min(by_axis.values()) >= 7
    assert all(bug.what and bug.kind for bug in CATALOGUE)


def test_the_page_has_todays_results():
    """After a change of the catalogue ``run.py --table`` writes it again."""
    assert run.PAGE.read_text("utf-8") == run.page()


def test_no_bug_survives():
    assert [name for name, result in run.results().items() if not result["by"]] == []


@pytest.mark.proof
@pytest.mark.parametrize("axis", sorted({bug.axis for bug in CATALOGUE}))
def test_all_are_caught(axis):
    """Runs those without a result; hours for an axis that never ran."""
    command = [sys.executable, "tests/planted/run.py", "--axis", axis]
    subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    done = run.results()
    assert [bug.name for bug in CATALOGUE if bug.axis == axis and bug.name not in done] == []
    assert [bug.name for bug in CATALOGUE if bug.axis == axis and not done[bug.name]["by"]] == []
