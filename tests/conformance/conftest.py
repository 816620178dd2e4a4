"""Fixtures of the documented commands."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from doc_commands import Programs  # noqa: E402
from running import Runner  # noqa: E402


@pytest.fixture(scope="session")
def runner(realdata, tmp_path_factory):
    """Starts the processes that a user would start."""
    return Runner(tmp_path_factory.mktemp("conformance"), realdata)


@pytest.fixture(scope="session")
def quick_runner(realdata, tmp_path_factory):
    """Runs Python programs in processes forked from one that has imported everything."""
    programs = Programs()
    yield Runner(tmp_path_factory.mktemp("conformance-quick"), realdata, programs)
    programs.close()
