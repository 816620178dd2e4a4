"""Tests on forked processes: everything runs once and is reported, whatever a process does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import stem

HELPERS = Path(__file__).parents[1] / "helpers"

CONFTEST = """
import pytest
from forks import Forks

def pytest_configure(config):
    config.pluginmanager.register(Forks(2, False))

@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    yield tmp_path_factory.mktemp("shared")
    open(f"torn-down-{tmp_path_factory.getbasetemp().name}", "w").close()
"""
FIRST = """
import os, time, warnings
import pytest

def test_passes(shared):
    assert not list(shared.iterdir())
    (shared / "file").touch()

def test_fails(shared):
    print("printed before")
    assert [1] == [2]

@pytest.mark.skip(reason="why not")
def test_skipped(): ...

def test_dies(shared):
    if not (orphan := os.fork()):
        time.sleep(300)  # with all that the process has open
        os._exit(0)
    open("orphan", "w").write(str(orphan))
    os._exit(7)

def test_after_death(shared):
    warnings.warn("heard of")

@pytest.mark.parametrize("n", range(20))
def test_many(n): ...
"""
OTHERS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("at its end")

def test_broken(broken, shared): ...

@pytest.mark.parametrize("n", range(20))
def test_many(n, shared): ...
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder with two processes."""
    (folder / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HELPERS)!r})\n{CONFTEST}"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "--rootdir=."]
    with (folder / "output").open("w") as output:
        done = subprocess.run([*command, "."], cwd=folder, stdout=output, stderr=output)
    if (folder / "orphan").exists():  # the run has not waited for it
        os.kill(int((folder / "orphan").read_text()), signal.SIGKILL)
    return subprocess.CompletedProcess(
        command, done.returncode, stdout=(folder / "output").read_text()
    )


def test_reports_of_every_process(tmp_path):
    (tmp_path / "test_first.py").write_text(FIRST)
    for number in range(3):
        (tmp_path / f"test_other{number}.py").write_text(OTHERS)
    done = run(tmp_path, "-v", "--junitxml=out.xml")
    assert done.returncode == 1
    assert "2 failed, 85 passed, 1 skipped, 1 warning, 3 errors" in done.stdout
    for line in ("assert [1] == [2]", "printed before", "heard of", "at its end"):
        assert line in done.stdout
    assert "its process ended with exit code 7" in done.stdout
    for line in ("test_first.py::test_dies FAILED", "test_other2.py::test_many[19] PASSED"):
        assert done.stdout.count(line) == 1
    # The process that died left its own; the other and the third tore theirs down.
    assert len(list(tmp_path.glob("torn-down-*"))) == 2
    assert (tmp_path / "out.xml").read_text().count("<testcase ") == 88


@pytest.mark.parametrize("ending", ["-x", "--collect-only", "missing"])
def test_ends_as_pytest_ends(tmp_path, ending):
    text = FIRST if ending != "missing" else "import missing_module"
    (tmp_path / "test_first.py").write_text(text)
    done = run(tmp_path, *([ending] if ending[0] == "-" else []))
    code, words = {
        "-x": (1, "stopping after "),
        "--collect-only": (0, "25 tests collected"),
        "missing": (2, "No module named 'missing_module'"),
    }[ending]
    assert done.returncode == code
    assert words in done.stdout


@pytest.mark.features  # the stem imports modules of features
def test_output_of_forked_processes_does_not_block_them():
    process = stem.shared().start("builtins", "print", "x" * 2**18, environment=os.environ)
    process.join()
    assert process.exitcode == 0


@pytest.mark.features  # the stem imports modules of features
def test_another_process_with_the_id_of_one_that_has_ended_lives(tmp_path):
    (tmp_path / "jobs.py").write_text(
        "import time\ndef end(pipe): pass\ndef stay(pipe): time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended, other = (
        stem.shared().start("jobs", name, environment=environment) for name in ("end", "stay")
    )
    ended.join()
    ended.pid = other.pid
    ended.kill()
    assert ended.exitcode == 0
    assert other.exitcode is None
    other.kill()
    other.join()
    assert other.exitcode == -9
