"""Fixtures for the tests of the documentation."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))

from doc_commands import Programs, prepare  # noqa: E402


@pytest.fixture(scope="session")
def programs():
    """The project's programs, started from a process that has imported everything."""
    started = Programs()
    yield started
    started.close()


@pytest.fixture(scope="session")
def prepared(programs, tmp_path_factory) -> Path:
    """A folder with the text, tokenizer, data and checkpoints that the pages speak of."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder, programs)
    return folder
