"""The parts of a long test run: together they are the whole run, and no test is in two."""

import sys
from pathlib import Path

import parts
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_every_test_is_in_one_part(request, count):
    """Of the tests of this very run, however it was selected."""
    tests = [item.nodeid for item in request.session.items]
    found = [
        [test for piece in part for test in piece.tests]
        for part in parts.split(tests, count, parts.recorded())
    ]
    assert sorted(sum(found, [])) == sorted(tests)
    assert len(found) == count


def test_parts_take_equally_long_and_keep_files_together():
    seconds = {"a.py": 1.0, "b.py": 0.01, "b.py::test_long": 30.0, "c": 0.1}
    tests = [f"a.py::test_x[{n}]" for n in range(200)]
    tests += ["b.py::test_long", "b.py::test_short"]
    tests += [f"c{n}.py::test_y[{m}]" for n in range(20) for m in range(10)]
    found = parts.split(tests, 3, seconds)
    took = [sum(piece.seconds for piece in part) for part in found]
    assert sum(took) == pytest.approx(250.01)
    assert max(took) < 1.1 * min(took)
    pieces = [piece for part in found for piece in part]
    # Only what is long is cut, and what was cut is in order.
    assert {p.name for p in pieces if p.name[0] != "a"} >= {f"c{n}.py-1" for n in range(20)}
    cut = sorted((p for p in pieces if p.name[0] == "a"), key=lambda p: int(p.name[5:]))
    assert 10 < len(cut) < 40
    assert [test for piece in cut for test in piece.tests] == tests[:200]


def collected(*options: str) -> set[str]:
    """Names of the tests that pytest would run of two files."""

    class Names:
        found: set[str] = set()

        def pytest_collection_finish(self, session):
            self.found = {item.nodeid for item in session.items}

    names = Names()
    files = [ROOT / "tests/core" / name for name in ("test_parts.py", "test_structure.py")]
    quiet = "--collect-only -q -p no:cacheprovider -p no:faulthandler -p no:unraisableexception"
    pytest.main([*quiet.split(), *options, *map(str, files)], plugins=[names])
    return names.found


def test_pytest_selects_parts(capfd):
    whole, first, second = collected(), collected("--part", "1/2"), collected("--part", "2/2")
    assert first and second and not first & second
    assert first | second == whole
    assert not collected("--part", "3/2")
    assert "--part 3/2: expected I/N with I from 1 to N, as in 2/4" in capfd.readouterr().err


def test_seconds_of_junit_files(tmp_path, monkeypatch):
    (tmp_path / "seconds.txt").write_text(
        "2 tests/core\n5 tests/core/test_parts.py\n9 tests/core/test_parts.py::test_a\n"
    )
    (tmp_path / "junit.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.core.test_parts" name="test_a[1]" time="0.5"/>
        <testcase classname="tests.core.test_parts" name="test_b@tests/core/x.py-1" time="0.1"/>
        <testcase classname="tests.core.test_parts.TestC" name="test_c[x.y]" time="3"/>
        <testcase classname="tests.core.test_parts.TestC" name="test_c[z]" time="5"/>
        </testsuite></testsuites>"""
    )
    monkeypatch.setattr(parts, "RECORDED", tmp_path / "seconds.txt")
    monkeypatch.setattr(sys, "argv", ["parts.py", str(tmp_path / "junit.xml")])
    parts.main()
    assert parts.recorded() == {
        "tests/core": 2.0,
        "tests/core/test_parts.py": 0.3,
        "tests/core/test_parts.py::TestC::test_c": 4.0,
    }
    assert parts.slow(parts.recorded()) == {"tests/core/test_parts.py::TestC::test_c"}


def test_make_test_leaves_out_what_is_slow():
    quick, whole = collected("-m", "not proof and not slow"), collected("-m", "not proof")
    left_out = {name.partition("[")[0] for name in whole - quick}
    assert quick and left_out == parts.slow(parts.recorded()) & {n.partition("[")[0] for n in whole}
    assert left_out
